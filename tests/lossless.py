"""One model on eight devices, and every way to generate with it: static, adaptive, judged.

What the tests of the lossless contract and `python -m benchmarks.contracts.lossless` have in common; hence its
name with `tests.` in front, by which both find it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.config.rollout import AskedRollout, RolloutConfig
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.draft.drafters import NO_DRAFTER
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.config import ExpertsConfig, ModelConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.lora import Adapters, Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Carry, Load, Plan, Split
from tests.near_ties import Judge, Tally, compare

_BASE = ModelConfig("qwen3", 61, 32, 64, 2, 8, 8, head_dim=8, qk_norm=True, vocab_multiple=8)
MODELS = {
    "kv8": _BASE,
    "kv2": replace(
        _BASE,
        architecture="qwen2",
        num_kv_heads=2,
        qk_norm=False,
        attention_bias=True,
        vocab_multiple=32,
    ),
    # 96 rows of embedding: with TP 8 the last shards are padding only.
    "kv1": replace(
        _BASE,
        architecture="llama",
        num_kv_heads=1,
        qk_norm=False,
        tie_embeddings=True,
        vocab_multiple=48,
    ),
}
EXPERTS = {
    # An expert a device, two for each token, and a dense layer between.
    "moe": replace(
        _BASE,
        architecture="qwen3_moe",
        num_layers=3,
        experts=ExpertsConfig(8, 2, 16, dense_layers=(1,)),
    ),
    # Two experts on each of four devices; the other four have the same.
    "mixtral": replace(
        _BASE,
        architecture="mixtral",
        num_kv_heads=2,
        qk_norm=False,
        experts=ExpertsConfig(4, 2, 64),
    ),
    # An expert a device, which sees a quarter of a token's numbers.
    "bigmac": replace(_BASE, architecture="bigmac", experts=ExpertsConfig(8, 2, 64, latent_dim=8)),
}
EOS_IDS = (0, 1, 2)
CARRIES: tuple[Carry, ...] = ("migrate", "mixed", "recompute")
PATHS = ((1, 2, 4, 8, 2), (1, 8), (8, 1), (2, 8, 1), (4, 1, 8), (8, 4, 2, 1))  # TP degrees


@dataclass(frozen=True)
class Settings:
    """How much is generated, and in which shapes."""

    sequences: int = 16
    max_prompt_length: int = 12
    max_completion_length: int = 52
    min_rows: int = 4
    min_length: int = 32
    page_size: int = 8
    prefill_blocks: int = 4
    kv_pages: int = 0
    reshard_bytes: int = 2**15  # several chunks even of such small models
    max_logprobs: int = 0
    weights: WeightFormat = "auto"
    lora_rank: int = 0  # of adapters beside the weights
    degrees: tuple[
        int, ...
    ] = ()  # TP of the layouts; where none is named all that divide the model
    drafter: Drafter = NO_DRAFTER

    @property
    def rollout(self) -> RolloutConfig:
        return AskedRollout(
            max_prompt_length=self.max_prompt_length,
            max_completion_length=self.max_completion_length,
            check_every=2,
            burst_steps=4,
            page_size=self.page_size,
            prefill_blocks=self.prefill_blocks,
            kv_pages=self.kv_pages,
            min_rows=self.min_rows,
            min_length=self.min_length,
            max_logprobs=self.max_logprobs,
            weights=self.weights,
            check_integrity=True,
        )


class Halved(ScriptedPath):
    """The shorter half of the sequences is recomputed, the longer migrates."""

    def decide(self, load: Load, current: Split, options=()) -> Plan:
        below = int(np.median(load.context))
        return replace(super().decide(load, current), recompute_below=below)


def _lively_adapters(lora: Lora) -> Adapters:
    """That change what is said."""
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), lora.abstract_params
    )


class Subject:
    """One model on all devices: an engine, the weights it gets, and a judge that shares neither.

    Where query heads are padded the judge has the unpadded model.
    """

    def __init__(
        self,
        config: ModelConfig,
        settings: Settings,
        dtype: jnp.dtype = jnp.float32,
        num_devices: int | None = None,
        kernels: Kernels | None = None,  # those of the devices' platform, where not given
        is_compiled: bool = True,  # else each program when it is first needed
    ):
        self.settings, self.dtype = settings, dtype
        padded, plain = map(Policy.from_config, (config, replace(config, query_multiple=1)))
        params = lively_params(plain)
        self.policy, self._judged = (x.with_weights(settings.weights) for x in (padded, plain))
        if rank := settings.lora_rank:
            of_experts = ["gate_up_proj", "down_proj", "gate.weight"] if config.experts else []
            targets = ["all-linear", *of_experts]
            lora, wide = (
                Lora.of(policy, rank=rank, alpha=2 * rank, targets=targets)
                for policy in (plain, padded)
            )
            params = lora.attach(params, _lively_adapters(lora))
            padded = wide.beside(padded)
            self.policy, self._judged = wide.beside(self.policy), lora.beside(self._judged)
        self.judged_params: Params = jax.device_get(self._judged.store(params, dtype))
        self.params: Params = jax.device_get(self.policy.store(pad(params, padded), dtype))
        devices = jax.devices()[:num_devices]
        layouts, _ = layout_chain(factored_mesh(devices), self.policy.config, kernels)
        if degrees := settings.degrees:
            layouts = {split: layout for split, layout in layouts.items() if split.tp in degrees}
        self.engine = RolloutEngine(
            self.policy,
            devices,
            settings.rollout,
            capacity=settings.sequences,
            eos_ids=EOS_IDS,
            dtype=dtype,
            layouts=layouts,
            reshard_bytes=settings.reshard_bytes,
            drafter=settings.drafter,
        )
        if is_compiled:
            self.engine.compile()

    @cached_property
    def judge(self) -> Judge:
        longest = self.settings.max_prompt_length + self.settings.max_completion_length
        return Judge(self._judged, self.judged_params, self.dtype, longest)

    def weights(self, layout: Layout) -> Params:
        """A copy of the weights on the shards of `layout`, for the engine to delete."""
        return jax.device_put(self.params, layout.param_shardings(self.policy))

    def run(
        self,
        requests: Sequence[Request],
        planner: Planner,
        exit_head: np.ndarray | None = None,
        earlier: EarlierResponses | None = None,
        should_stop: Callable[[int, np.ndarray], bool] | None = None,
    ) -> tuple[list[Completion], RolloutReport]:
        none, report = np.zeros(0, int), RolloutReport()
        layout = self.engine.layouts[planner.start(Load(none, none, none, none))]
        self.engine.set_weights(self.weights(layout), layout, exit_head)
        stream = self.engine.stream(requests, planner, report, should_stop, earlier=earlier)
        done = dict(stream)
        self.engine.release_weights()
        return [done[i] for i in range(len(requests))], report

    def compared(
        self,
        requests: Sequence[Request],
        static: Sequence[Completion],
        *others: Sequence[Completion],
    ) -> Tally:
        """Other runs against a static one, all kinds of sampling together."""
        return sum(tally(self, requests, static, others).values(), Tally())

    def static(self, tp: int) -> FixedLayout:
        return FixedLayout(next(split for split in self.engine.layouts if split.tp == tp))

    def adaptive(self, path: Sequence[int], carry: Carry, num_sequences: int) -> ScriptedPath:
        """Along `path`, the switches spread evenly over the sequences that finish."""
        splits = {split.tp: split for split in self.engine.layouts}
        at = [num_sequences * (len(path) - i) // len(path) for i in range(1, len(path))]
        below = RECOMPUTE_ALL if carry == "recompute" else MIGRATE_ALL
        steps = (Step(splits[tp], running, below) for tp, running in zip(path[1:], at, strict=True))
        script = Halved if carry == "mixed" else ScriptedPath
        return script(splits[path[0]], tuple(steps))


def lively_params(policy: Policy) -> Params:
    """Weights so large that every part of the model moves its output, and no token is certain."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: np.asarray(x) + rng.normal(0, 0.2, x.shape).astype(np.float32), policy.init(0)
    )


def pad(params: Params, policy: Policy) -> Params:
    """Unpadded arrays as those of a padded policy, on the host."""
    return jax.tree.map(
        lambda like, x: np.pad(x, [(0, n - m) for n, m in zip(like.shape, x.shape, strict=True)]),
        policy.abstract_params,
        params,
    )


KINDS = ("greedy", "sampled", "filtered", "penalized")


def kind(request: Request) -> str:
    sampling = request.sampling
    if sampling.has_penalty:
        return "penalized"
    if sampling.temperature == 0:
        return "greedy"
    return "filtered" if sampling.top_k or sampling.top_p < 1 else "sampled"


def make_requests(settings: Settings, seed: int) -> list[Request]:
    """Every kind of sampling and of ending, with lengths from a few tokens to the most."""
    rng = np.random.default_rng(seed)
    longest, vocab = settings.max_completion_length, _BASE.vocab_size
    options = {
        "greedy": Sampling(temperature=0.0),
        "sampled": Sampling(),
        "filtered": Sampling(temperature=0.8, top_k=12, top_p=0.9),
        "penalized": Sampling(min_p=0.01, repetition_penalty=1.3, presence_penalty=0.5),
    }
    requests = []
    for i in range(settings.sequences):
        # Two of three run to a length of their own, the others to an end-of-sequence token.
        is_forced = i % 9 < 6
        length = longest * (i + 1) // settings.sequences if is_forced else longest
        requests.append(
            Request(
                tokens=tuple(
                    rng.integers(3, vocab, rng.integers(1, settings.max_prompt_length + 1))
                ),
                key=sequence_key(seed, i),
                max_new_tokens=max(1, length),
                ignore_eos=is_forced,
                sampling=options[KINDS[i % 4]],
            )
        )
    return requests


def tally(
    subject: Subject,
    requests: Sequence[Request],
    static: Sequence[Completion],
    others: Sequence[Sequence[Completion]],
) -> dict[str, Tally]:
    """Other runs against a static one, by kind of sampling."""
    counts: dict[str, Tally] = dict.fromkeys(KINDS, Tally())
    decisions = subject.judge.decisions(requests, static)
    for other in others:
        for request, a, b, decided in zip(requests, static, other, decisions, strict=True):
            counts[kind(request)] += compare(a, b, decided)
    return counts
