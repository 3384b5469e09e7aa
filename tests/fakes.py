"""Small real things that several tests share: compiled engines, loads, made-up machines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np

from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.planning.latency.model import ROUNDS, LatencyModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import BurstResult, Load, Plan, Split
from pat_jax.profiling.simulate.machine import Machine
from tests.lossless import EXPERTS, MODELS, PATHS, Settings, Subject, make_requests

# Of two KV heads TP 2 splits them, and TP 8 copies them as well; programs between two layouts are most of
# what is compiled, and four layouts have twice as many pairs as three. Of eight heads each has its own, of
# one all have copies: the narrowest and the widest differ most.
SETTINGS = {
    "kv8": Settings(min_rows=4, min_length=64, degrees=(1, 8)),  # compacts its rows twice
    # Lengthens its cache.
    "kv2": Settings(min_rows=8, max_logprobs=3, reshard_bytes=2**14, degrees=(1, 2, 8)),
    "kv1": Settings(min_rows=16, min_length=64, page_size=4, degrees=(1, 8)),
    "moe": Settings(min_rows=8, min_length=64, degrees=(1, 2, 8)),
    "mixtral": Settings(min_rows=16, min_length=64, degrees=(1, 8)),
    "bigmac": Settings(min_rows=16, min_length=64, degrees=(1, 2, 8)),
}
# Of each model, those of `PATHS` that its layouts have.
MODEL_PATHS = [
    (name, path)
    for name in MODELS
    for path in ((1, 2, 8, 2), *PATHS)
    if not SETTINGS[name].degrees or set(path) <= {*SETTINGS[name].degrees}
]


def subject(name: str, weights: WeightFormat = "auto", lora_rank: int = 0) -> Subject:
    """An engine on eight devices, made once for all tests: compiling is what costs. Of "kv2" all programs
    are compiled at once, of others those that tests need."""
    return _subject(name, weights, lora_rank)


@cache  # of all its arguments: a default that is given would make another subject
def _subject(name: str, weights: WeightFormat, lora_rank: int) -> Subject:
    settings = replace(SETTINGS[name], weights=weights, lora_rank=lora_rank)
    model, is_compiled = (MODELS | EXPERTS)[name], (name, weights) == ("kv2", "auto")
    return Subject(model, settings, is_compiled=is_compiled)


@cache
def static_run(name: str, seed: int) -> tuple[list[Request], list[Completion]]:
    """What the engine generates without switching, on eight replicas."""
    requests, one = make_requests(SETTINGS[name], seed), subject(name)
    return requests, one.run(requests, one.static(1))[0]


def ran(split: Split, rows: int, length: int, step_s: float) -> BurstResult:
    """A burst of one step in which every row of one group holds as much as the bucket has room for."""
    return BurstResult(split, rows, length, rows, rows * length, 1, step_s)


def longest_requests(settings: Settings) -> list[Request]:
    """Each has the longest prompt, unlike any other, and says as much as it may."""
    rng = np.random.default_rng(0)
    return [
        replace(
            request,
            tokens=tuple(rng.integers(3, 61, settings.max_prompt_length).tolist()),
            max_new_tokens=settings.max_completion_length,
            ignore_eos=True,
        )
        for request in make_requests(settings, 0)
    ]


@dataclass
class AtStep(Planner):
    """Goes to another layout once so many decode steps have been made."""

    first: Split
    target: Split
    step: int

    def start(self, load: Load) -> Split:
        del load
        return self.first

    def decide(self, load: Load, current: Split, options=()) -> Plan:
        if load.step < self.step:
            return Plan(self.first, threshold=0, reason="not yet")
        if current == self.first:
            self.context = load.context  # int[running], tokens in the cache at the switch
        return Plan(self.target, threshold=0, reason="now")


SPLITS = (Split(8, 1), Split(4, 2), Split(2, 4), Split(1, 8))


def made_up_latency(
    step: dict[Split, float],
    per_row: dict[Split, float],
    *,
    reshard: float,
    migrate_per_token: float,
    prefill: float = 1.0,
    shift_per_token: float | None = None,
    max_rows: int = 64,
    lengths: Sequence[int] = (64, 128),
) -> LatencyModel:
    """A machine whose decode step takes `step` + rows · `per_row` seconds.

    Args:
      shift_per_token: of a group, to another group of its layout; None where that was not measured.
    """
    rows = range(1, max_rows + 1)
    pairs = list(permutations(step, 2))
    return LatencyModel(
        decode_table={
            (split, n, length): (step[split] + n * per_row[split]) * (1 + length / 1000)
            for split in step
            for n in rows
            for length in lengths
        },
        reshard_table=dict.fromkeys(pairs, reshard),
        migrate_table={
            (source, target, kind): seconds
            for source, target in pairs
            for kind, seconds in zip(
                ROUNDS,
                (max(source.dp, target.dp) * migrate_per_token, migrate_per_token),
                strict=True,
            )
        }
        | (
            {(split, split, ROUNDS[0]): shift_per_token for split in step}
            if shift_per_token
            else {}
        ),
        prefill_table={(split, length): prefill for split in step for length in lengths},
        prefill_blocks=8,
        page_size=16,
        round_tokens=1,
    )


def made_up_machine(
    config: RolloutConfig,
    capacity: int,
    lengths: Sequence[int],
    step: Sequence[float],
    *,
    per_row: float,
    **costs: Any,
) -> Machine:
    """`made_up_latency` with one step time for each of `SPLITS`, and a config's buckets."""
    latency = made_up_latency(
        dict(zip(SPLITS, step, strict=True)),
        {split: per_row * split.tp**0.5 for split in SPLITS},
        max_rows=capacity,
        lengths=lengths,
        **costs,
    )
    return Machine.of(latency, SPLITS, config, capacity=capacity)


def make_load(
    num_running: int,
    split: Split,
    *,
    generated: int = 0,
    remaining_tokens: int = 100,
    prompt: int = 10,
) -> Load:
    """`num_running` sequences alike, dealt out evenly to the groups of `split`."""
    per_replica = -(-num_running // split.dp)
    return Load(
        replica=np.arange(num_running) // per_replica,
        generated=np.full(num_running, generated),
        context=np.full(num_running, prompt + generated - 1),
        remaining_tokens=np.full(num_running, remaining_tokens),
        step=generated,
    )


@dataclass(frozen=True)
class FakeDevice:
    """What a mesh needs to know of a device of another machine."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"


def fake_devices(*per_host: int) -> list[FakeDevice]:
    """Numbered in turns over the hosts, so that neighbours in number are on different ones."""
    hosts = sorted((turn, host) for host, n in enumerate(per_host) for turn in range(n))
    return [FakeDevice(number, host) for number, (_, host) in enumerate(hosts)]
