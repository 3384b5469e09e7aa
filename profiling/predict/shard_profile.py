"""Profiles many devices with one: measures each layout's shard, and computes its collectives.

With tensor parallelism a device runs a model with fewer heads, a narrower MLP and a part of the
vocabulary. Such a model is built for each layout and measured on one real device with the engine's
own programs. Times of collectives from `links.py` are added, and switches are computed. So is
sampling from all logits, if shards split blocks of the vocabulary (`gumbel.py`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sizing.device_memory import memory_limit
from pat_jax.engine.sizing.memory import engine_memory, kv_bytes
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.layout.buckets import Buckets
from pat_jax.layout.chain import kv_ways, layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.memory import GIB, USABLE
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.links import Sums
from pat_jax.profiling.predict.targets import Target, paper_devices

log = logging.getLogger(__name__)

ALONE = Split(1, 1)
SUMS: Sums = "nccl"  # what XLA's programs call
Progress = Callable[[int, int], None]  # gets the number of programs done, and of all


def layouts_of(target: Target, model: ModelConfig) -> dict[Split, Layout]:
    """Returns every layout of the target that divides the model, lowest TP first."""
    return layout_chain(factored_mesh(paper_devices(target)), model)[0]


def shard_of(model: ModelConfig, layout: Layout) -> ModelConfig:
    """Returns a model with one device's part of `model`, and of its padding, in `layout`."""
    tp = layout.split.tp
    return replace(
        model,
        num_heads=model.padded_num_heads // tp,
        num_kv_heads=model.num_kv_heads // layout.size(layout.kv_axes),
        query_multiple=1,
        mlp_dim=model.mlp_dim // tp,
        vocab_size=model.padded_vocab_size // tp,
        vocab_multiple=1,
    )


@dataclass(frozen=True)
class ShardProfiler:
    """Measures the shards of one model on one device."""

    model: ModelConfig  # the whole model, its vocabulary padded for the target
    target: Target
    config: RolloutConfig
    device: Device
    dtype: jnp.dtype
    capacity: int  # most running sequences of the whole target
    seed: int = 0
    runs: int = 3
    known: LatencyModel | None = None  # earlier measurements of the same target

    @cached_property
    def engines(self) -> dict[Split, RolloutEngine]:
        """An engine for each layout's shard that fits on the device. Nothing is compiled. Raises
        UserError if no shard fits, or if the model has experts."""
        if self.model.experts is not None:
            raise UserError(
                f"option --shards is {str(self.target)!r}: the model has experts, which compute rows of "
                "all replicas, so that no device's part of a step can be measured alone; measure on the "
                "whole machine without --shards, or predict steps with python -m pat_jax.plan."
            )
        layouts = layouts_of(self.target, self.model)
        engines = {split: self._engine(split) for split in layouts}
        needs = {a: engine_memory(x.specs, self.config).held(ALONE) for a, x in engines.items()}
        usable = USABLE * memory_limit(self.config.device_memory_gib, [self.device])
        for split, need in needs.items():
            if need > usable:
                log.info("layout dropped: %s: a shard takes %.3g GiB here", split, need / GIB)
                del engines[split]
        if not engines:
            least = f", the smallest shard {min(needs.values()) / GIB:.3g} GiB" if needs else ""
            raise UserError(
                f"option --shards is {str(self.target)!r}: {len(layouts)} of its layouts divide the "
                f"model and none has a shard that fits on this device{least}; name a target with more "
                "devices or a smaller model."
            )
        return engines

    def measure(self, progress: Progress) -> LatencyModel:
        """Measures one shard after the other; returns the latency model of the target.

        A shard whose times are all known is neither compiled nor run.
        """
        lacking = [warmup for warmup in self.warmups.values() if _is_lacking(warmup)]
        for warmup in lacking:
            warmup.engine.compile()
        total = sum(warmup.total for warmup in lacking)
        before = 0
        for warmup in lacking:  # a device may have the memory for one shard only
            warmup.progress = lambda done, _, before=before: progress(before + done, total)
            policy = warmup.engine.policy
            warmup.measure(
                lambda layout, policy=policy: policy.init(
                    self.seed, layout.param_shardings(policy), self.dtype
                )
            )
            before += warmup.total
        return self.latency

    @cached_property
    def warmups(self) -> dict[Split, Warmup]:
        """The warm-ups that measure the shards, by layout."""
        return {
            split: Warmup(engine, known=self._known(split), runs=self.runs)
            for split, engine in self.engines.items()
        }

    @property
    def latency(self) -> LatencyModel:
        """The latency model so far. Collectives are added to new times; earlier times include them
        already."""
        decode, prefill = {}, {}
        for split, warmup in self.warmups.items():
            for (_, *at), seconds in warmup.timings.known["decode_table"].items():
                decode[split, *at] = seconds
            for (_, *at), seconds in warmup.timings.known["prefill_table"].items():
                prefill[split, *at] = seconds
            for (_, rows, length), seconds in warmup.timings.new["decode_table"].items():
                decode[split, rows, length] = seconds + self._besides_s(split, rows)
            for (_, length), seconds in warmup.timings.new["prefill_table"].items():
                prefill[split, length] = seconds + self.composer.prefill_links_s(split)
        reads = next(iter(self.engines.values())).specs.reads
        return replace(self._switches, decode_table=decode, prefill_table=prefill, reads=reads)

    @cached_property
    def _switches(self) -> LatencyModel:
        return self.composer.latency_model(self.buckets)

    def _known(self, split: Split) -> LatencyModel | None:
        """Returns a layout's known times, under the layout that its shard has on this device."""
        if self.known is None:
            return None
        tables = {
            name: {
                (ALONE, *at): seconds
                for (of, *at), seconds in getattr(self.known, name).items()
                if of == split
            }
            for name in ("decode_table", "prefill_table")
        }
        return replace(self.known, **tables, reshard_table={}, migrate_table={})

    @cached_property
    def composer(self) -> Composer:
        weight_bytes = 1 if self.config.weights != "auto" else jnp.dtype(self.dtype).itemsize
        return Composer(
            ModelledKernels(self.target, weight_bytes, SUMS),
            self.model,
            page_size=self.config.page_size,
            prefill_blocks=self.config.prefill_blocks,
            divided=kv_ways(layouts_of(self.target, self.model)),
        )

    @cached_property
    def buckets(self) -> Buckets:
        """The buckets of the target's layouts whose shards are measured."""
        return Buckets.of(tuple(self.engines), self.capacity, self.config)

    def _engine(self, split: Split) -> RolloutEngine:
        all_of_them = layouts_of(self.target, self.model)
        policy = Policy.from_config(shard_of(self.model, all_of_them[split]))
        policy = policy.with_weights(self.config.weights)
        layouts, _ = layout_chain(factored_mesh([self.device]), policy.config)
        limit = memory_limit(self.config.device_memory_gib, [self.device])
        return RolloutEngine(
            policy,
            [self.device],
            self.config,
            capacity=Buckets.of(tuple(all_of_them), self.capacity, self.config).rows[split][-1],
            eos_ids=(0,),
            dtype=self.dtype,
            layouts=layouts,
            kv_bytes=kv_bytes(policy, layouts, self.config, self.dtype, limit=limit, resident=()),
        )

    def _besides_s(self, split: Split, rows: int) -> float:
        """Returns the seconds that the shard's own steps lack: sampling and collectives."""
        left_out = self.composer.sampled_logits(split.tp) - self.model.padded_vocab_size // split.tp
        sampling = self.composer.sampling_s(rows, left_out) if left_out else 0.0
        return sampling + self.composer.decode_links_s(rows, split)


def _is_lacking(warmup: Warmup) -> bool:
    buckets = warmup.specs.buckets
    decode = {(ALONE, n, length) for n in buckets.rows[ALONE] for length in buckets.lengths}
    prefill = {(ALONE, length) for length in buckets.lengths}
    known = warmup.timings.known
    return bool(decode - known["decode_table"].keys() or prefill - known["prefill_table"].keys())
