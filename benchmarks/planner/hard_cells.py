"""Rollouts that are hard to plan: pools too small for all sequences, lengths of two or three values.

Machines are composed as in `regret_cells`; memory is the engine's own account of a model on a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.planner.kernel_tables import GPUS, SPLITS, machine_of, measured_kernels, options_of
from pat_jax.config.programs import of_rollouts
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.engine.sizing.pool_pages import page_bytes
from pat_jax.models.presets import preset
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.memory import GIB, MemoryModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.cross_compile.target_build import Order
from pat_jax.profiling.predict.composer import SWITCH_S
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.draw import Draw
from pat_jax.profiling.simulate.length_files import read_lengths
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.response_lengths import ResponseLengths
from pat_jax.profiling.simulate.simulator import replay

GPU = "8xH100"
SAMPLES = 8  # of a prompt
SETS = {  # file, cap in tokens, and how many times as long
    "math": ("zeroeval_math-l5_Qwen2.5-7B-Instruct.csv", 4096, 1.0),
    "gsm": ("zeroeval_gsm_Qwen2-7B-Instruct.csv", 4096, 1.0),
    "code": ("azure2023_code_lengths.csv", 2048, 1.0),
    "r1": ("servegen_deepseek_r1_client35_output_hist.csv", 16_384, 1.0),
    "r1 x4": ("servegen_deepseek_r1_client35_output_hist.csv", 16_384, 4.0),
}
POOLS_GIB = (3.0, 5.0, 10.0, 20.0, 40.0)  # of a device


@dataclass(frozen=True)
class Trial:
    """One rollout, and what the planner believes of lengths."""

    machine: Machine
    workload: Workload
    lengths: LengthModel


@dataclass(frozen=True)
class Outcome:
    static_s: tuple[float, ...]  # of each of `SPLITS`
    adaptive_s: float
    switches: int
    preempted: int

    @property
    def loss(self) -> float:
        """Against the best static layout."""
        return self.adaptive_s / min(self.static_s) - 1


def outcome(trial: Trial) -> Outcome:
    """Every static layout keeps its groups even and knows the same lengths."""
    machine, truth = trial.machine, trial.machine.truth
    static = [
        replay(trial.workload, CostModelPlanner((split,), truth, trial.lengths), machine)
        for split in SPLITS
    ]
    planner = CostModelPlanner(SPLITS, truth, trial.lengths, memory=machine.memory)
    done = replay(trial.workload, planner, machine)
    static_s = tuple(one.total_s for one in static)
    return Outcome(static_s, done.total_s, len(done.switches), done.preempted)


@dataclass(frozen=True)
class Pressed:
    """A pool of so many GiB of each device; lengths were learned from one rollout before."""

    model: str
    size: int
    lengths: str
    pool_gib: float

    def __str__(self) -> str:
        return f"{self.model}, {self.size} sequences, {self.lengths}, pool {self.pool_gib:g} GiB"

    def trial(self, data: Path, seed: int) -> Trial:
        file, cap, scale = SETS[self.lengths]
        known = _known(data / "lengths" / file)
        draw = Draw(self.size, cap, SAMPLES, scale=scale, seed=seed)
        seen, workload = (known.draw(replace(draw, seed=n)) for n in (1000 + seed, seed))
        lengths = LengthModel.empty(cap)
        lengths = lengths.updated(seen.responses, seen.responses >= cap, seen.prompt_id)
        longest = draw.prompt_tokens if known.prompts is None else int(known.prompts.max())
        memory = _memory(self.model, self.size, (longest, cap), self.pool_gib)
        of_model = measured_kernels(data, GPU), self.model, self.size, (longest, cap)
        machine = replace(machine_of(*of_model), memory=memory)
        return Trial(machine, workload, lengths)


@dataclass(frozen=True)
class Small:
    """Lengths of two or three values, believed to be those of `belief`; room for all."""

    model: str
    values: tuple[int, ...]  # tokens
    counts: tuple[int, ...]  # responses of each
    belief: str = "r1"  # one of `SETS`
    switch_s: float = SWITCH_S  # known to the planner
    host_us: float = 0.0  # of each running sequence in each step; not known

    def __str__(self) -> str:
        responses = " + ".join(f"{n} x {v}" for n, v in zip(self.counts, self.values, strict=True))
        return (
            f"{self.model}, {responses}, believed {self.belief}, switches {self.switch_s:g} s, host "
            f"{self.host_us:g} us"
        )

    def trial(self, data: Path, seed: int) -> Trial:
        file, cap, scale = SETS[self.belief]
        known = _known(data / "lengths" / file)
        responses = np.random.default_rng(seed).permutation(np.repeat(self.values, self.counts))
        machine = machine_of(
            measured_kernels(data, GPU),
            self.model,
            len(responses),
            (100, cap),
            switch_s=self.switch_s,
            host_s_per_sequence=1e-6 * self.host_us,
        )
        seen = known.draw(Draw(1024, cap, 1, scale=scale, seed=1000 + seed)).responses
        lengths = LengthModel.empty(cap).updated(seen, seen >= cap)
        return Trial(machine, Workload(np.full(len(responses), 100), responses, cap), lengths)


def pressed_cells() -> Iterator[Pressed]:
    for cell in product(("llama-3.1-8b", "qwen3-14b"), (512, 1024), SETS, POOLS_GIB):
        yield Pressed(*cell)


def small_cells(count: int, seed: int = 0) -> Iterator[Small]:
    """Drawn: 8 to 128 responses of 32 to 1,600 tokens; the named ones first."""
    yield Small("llama-3.1-8b", (51, 61), (16, 16))
    yield Small("llama-3.1-8b", (51, 61), (24, 8))
    yield Small("llama-3.1-8b", (51, 400), (16, 16), switch_s=10 * SWITCH_S)
    rng = np.random.default_rng(seed)
    for _ in range(count):
        size, kinds = int(rng.choice([8, 16, 32, 64, 128])), int(rng.integers(2, 4))
        values = np.sort(np.exp(rng.uniform(np.log(32), np.log(1600), kinds)).astype(int))
        counts = 1 + rng.multinomial(size - kinds, rng.dirichlet(np.ones(kinds)))
        yield Small(
            str(rng.choice(["llama-3.1-8b", "qwen3-14b"])),
            tuple(values.tolist()),
            tuple(counts.tolist()),
            str(rng.choice(["r1", "math", "gsm"])),
            float(rng.choice([1, 10])) * SWITCH_S,
            float(rng.choice([0, 14])),
        )


@cache
def _known(path: Path) -> ResponseLengths:
    return read_lengths(path)


@cache
def _memory(model: str, size: int, lengths: tuple[int, int], pool_gib: float) -> MemoryModel:
    prompts = -(-size // SAMPLES)
    config = replace(options_of(lengths), prompts_per_step=prompts)
    one_page = page_bytes(preset(model), config.page_size, jnp.bfloat16)
    rollout = replace(config, kv_pages=int(pool_gib * GIB / one_page))
    run = of_rollouts(rollout, SpeculationConfig(), "bfloat16")
    return by_arithmetic(Order.of(Target.parse(GPUS[GPU]), run, preset(model), (0,))).memory
