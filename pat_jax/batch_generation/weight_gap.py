"""The difference between a policy with quantized weights and the same with full weights.

Both policies compute log-probabilities of the same tokens, by the model alone: temperature, filters
and penalties play no part. Knows policies, layouts and tokens; does not know files, nor where full
weights come from.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pat_jax.common.bars import bar
from pat_jax.common.pytree import on_host, with_sharding
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.layout.layout import Layout, layout_chain
from pat_jax.layout.partitions import ManualPartition
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.memory import GIB, USABLE
from pat_jax.rl.algorithm.logprobs import next_tokens, token_logprobs

TOKENS_OF_ONE = 512  # most of one response: many responses show more than one long one
CALL_TOKENS = 4096  # most of a replica's rows in a call, padding included; one row may be longer
SHORTEST = 128  # tokens of the shortest padded row
LOGIT_TOKENS = 512  # whose logits are in memory at a time, per device

LoadWeights = Callable[[Policy, Layout], Params]


@dataclass
class Sample:
    """The first responses of a run, up to a number of tokens."""

    max_tokens: int  # most tokens of responses to take
    num_tokens: int = 0  # tokens of responses taken so far
    # Prompt and response, int32[length], and the length of the prompt.
    sequences: list[tuple[np.ndarray, int]] = field(default_factory=list)

    def add(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Adds as much of a response as there is room for."""
        room = min(self.max_tokens - self.num_tokens, TOKENS_OF_ONE)
        if kept := response[:room]:
            self.sequences.append((np.array([*prompt, *kept], np.int32), len(prompt)))
            self.num_tokens += len(kept)


@dataclass(frozen=True)
class Gap:
    """|log π_quantized(token) - log π(token)| in nats, over the tokens of a sample."""

    mean: float
    largest: float


@dataclass(frozen=True)
class NoRoom:
    """Why no gap was measured: bytes per device, in the layout with the smallest shards."""

    needed: float
    usable: float

    def __str__(self) -> str:
        return (
            f"the full weights take {self.needed / GIB:.3g} GiB of a device, "
            f"{self.usable / GIB:.3g} can be used; more devices would hold them"
        )


def measure_gap(
    engine: RolloutEngine, sample: Sample, load_weights: LoadWeights, *, limit: float
) -> Gap | NoRoom:
    """Returns the gap of an engine that has generated `sample`, and frees the engine's weights.

    The quantized weights compute first and are freed before the full ones are loaded: no device
    ever holds both, nor the KV cache.

    Args:
      load_weights: returns a policy's weights in a layout, in the engine's data type.
      limit: memory of a device, in bytes.
    """
    policy = Policy.from_config(engine.policy.config)
    kernels = next(iter(engine.layouts.values())).kernels
    *_, layout = layout_chain(engine.mesh, policy.config, kernels)[0].values()
    shards = with_sharding(policy.abstract(engine.dtype), layout.param_shardings(policy))
    if shard_bytes(shards) > USABLE * limit:
        return NoRoom(shard_bytes(shards), USABLE * limit)
    assert engine.params is not None and engine.layout is not None, "it has just generated"
    quantized = _Scorer(engine.policy, engine.layout, engine.dtype)
    full = _Scorer(policy, layout, engine.dtype)
    total = len(quantized.calls(sample)) + len(full.calls(sample))
    with bar(total=total, unit="call", desc="comparing weights") as calls:
        theirs = quantized.logprobs(engine.params, sample, calls.update)
        engine.release_weights()
        params = load_weights(policy, layout)
        differences = np.abs(theirs - full.logprobs(params, sample, calls.update))
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    return Gap(float(differences.mean()), float(differences.max()))


@dataclass(frozen=True)
class _Scorer:
    """Computes one policy's log-probabilities without a cache, prompt and response in one call."""

    policy: Policy
    layout: Layout
    dtype: jnp.dtype

    def logprobs(
        self, params: Params, sample: Sample, tick: Callable[[], object]
    ) -> Float[np.ndarray, " tokens"]:
        found: dict[int, np.ndarray] = {}
        for places, tokens in self.calls(sample):
            rows = on_host(self._program(params, tokens))
            for place, row in zip(places, rows, strict=False):
                sequence, prompt = sample.sequences[place]
                found[place] = row[prompt - 1 : len(sequence) - 1]
            tick()
        return np.concatenate([found[place] for place in range(len(found))])

    def calls(self, sample: Sample) -> list[tuple[list[int], Int[np.ndarray, "rows length"]]]:
        """Returns batches of sequences: their indices in the sample and padded tokens. Rows of a
        batch have similar lengths, and every replica has equally many."""
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for place, (tokens, _) in enumerate(sample.sequences):
            by_length[max(SHORTEST, 1 << (len(tokens) - 1).bit_length())].append(place)
        found, groups = [], self.layout.split.dp
        for length, places in sorted(by_length.items()):
            most = max(1, CALL_TOKENS // (length * groups)) * groups
            rows = min(most, -(-len(places) // groups) * groups)
            for begin in range(0, len(places), rows):
                part, padded = places[begin : begin + rows], np.zeros((rows, length), np.int32)
                for row, place in zip(padded, part, strict=False):
                    tokens = sample.sequences[place][0]
                    row[: len(tokens)] = tokens
                found.append((part, padded))
        return found

    @cached_property
    def _program(self) -> Callable[[Params, np.ndarray], Array]:
        rows = self.layout.spec("batch")

        def run(params: Params, tokens: Int[Array, "rows length"]) -> Float[Array, "rows length"]:
            model, partition = self.policy.bind(params), ManualPartition(self.layout)
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
            hidden = model(tokens, positions, partition=partition, dtype=self.dtype).hidden
            logprobs, _ = token_logprobs(
                hidden,
                next_tokens(tokens),
                lambda hidden: model.logits(hidden, partition),
                vocab_size=self.policy.config.vocab_size,
                chunk=max(1, LOGIT_TOKENS // tokens.shape[0]),
            )
            return logprobs

        return jax.jit(
            jax.shard_map(
                run,
                mesh=self.layout.mesh,
                in_specs=(self.layout.param_specs(self.policy), rows),
                out_specs=rows,
                check_vma=False,
            )
        )
