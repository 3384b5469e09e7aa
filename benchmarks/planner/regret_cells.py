"""The grid of `planner_regret`: one rollout under every planner and every wrong belief, in seconds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.planner.kernel_tables import SPLITS, machine_of, measured_kernels
from benchmarks.planner.naive import NaiveThreshold
from benchmarks.planner.oracle import oracle
from benchmarks.planner.workloads import LengthData, read
from pat_jax.engine.warm_up.timings import rescaled
from pat_jax.planning.latency.model import TABLES, LatencyModel
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.profiling.predict.links import Sums
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay

SIZES = (128, 512, 2048)
TAILED, NO_TAIL = ("math", "gsm", "r1"), "code"
# To fit the wrong lengths on.
OTHER = {"math": "gsm", "gsm": "r1", "r1": "math", "code": "math"}
FOLLOWING = 1_000_000  # seeds of the rollouts that follow one another
FOLLOWED = 20  # of the first so many replays every other pair goes on to a second rollout
DEAR, TIMES_DEARER = "switches 20x dearer", 20
CHECK_SPREAD = 0.08  # of the one run by which the warm-up checks a profile, against the truth
ORACLE, DEAR_ORACLE = "clairvoyant", "clairvoyant, dear switches"
Beliefs = Callable[["Cell", LatencyModel, int], tuple[LatencyModel, LengthModel]]


def best_of(belief: str) -> str:
    """Which oracle plan it is measured by: the one that pays the same for a switch."""
    return DEAR_ORACLE if belief in (DEAR, checked(DEAR)) else ORACLE


def checked(belief: str) -> str:
    """The same after the warm-up has run every program once and put right what has changed."""
    return f"{belief}, checked"


def following(name: str) -> str:
    """The same in the rollout after: the planner has seen one of its kind by then."""
    return f"{name}, next rollout"


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    gpu: str
    model: str
    size: int
    lengths: str
    data: Path
    switch_s: float
    host_us: float = 0.0  # of each running sequence in each step, in every layout; no belief has it
    sums: Sums = "one-shot"  # how devices sum

    def __str__(self) -> str:
        return f"{self.model} on {self.gpu}, {self.size} sequences, {self.lengths}"

    @property
    def known(self) -> LengthData:
        return _lengths(self.data)[self.lengths]

    def rollouts(self, seed: int) -> tuple[Workload, Workload]:
        """One, and the one that follows, of other prompts."""
        known = self.known
        return known.sample(self.size, seed), known.sample(self.size, FOLLOWING + seed)

    def machine(self) -> Machine:
        return machine_of(
            measured_kernels(self.data, self.gpu, self.sums),
            self.model,
            self.size,
            (self.known.max_prompt, self.known.cap),
            switch_s=self.switch_s,
            host_s_per_sequence=1e-6 * self.host_us,
        )


@cache
def _lengths(data: Path) -> dict[str, LengthData]:
    return read(data)


@cache
def _fitted(data: Path, name: str, cap: int) -> LengthModel:
    return _lengths(data)[name].fitted(cap)


def _own_lengths(cell: Cell) -> LengthModel:
    return _fitted(cell.data, cell.lengths, cell.known.cap)


def right(cell: Cell, truth: LatencyModel, seed: int) -> tuple[LatencyModel, LengthModel]:
    del seed
    return truth, _own_lengths(cell)


def steps_wrong_alike(
    cell: Cell, truth: LatencyModel, seed: int
) -> tuple[LatencyModel, LengthModel]:
    """All step times by +20 % or all by -20 %."""
    factor = 1.2 if seed % 2 else 0.8
    table = {key: factor * seconds for key, seconds in truth.decode_table.items()}
    return replace(truth, decode_table=table), _own_lengths(cell)


def steps_wrong_by_layout(
    cell: Cell, truth: LatencyModel, seed: int
) -> tuple[LatencyModel, LengthModel]:
    """The step times of each layout by +20 % or -20 %, drawn for each: their order may change."""
    signs = np.random.default_rng((seed, 5)).choice([0.8, 1.2], len(SPLITS))
    factor = dict(zip(SPLITS, signs.tolist(), strict=True))
    table = {key: factor[key[0]] * seconds for key, seconds in truth.decode_table.items()}
    return replace(truth, decode_table=table), _own_lengths(cell)


def switches_wrong(cell: Cell, truth: LatencyModel, seed: int) -> tuple[LatencyModel, LengthModel]:
    """All switch costs three times too high or too low."""
    factor = 3.0 if seed % 2 else 1 / 3
    tables = {
        name: {key: factor * seconds for key, seconds in getattr(truth, name).items()}
        for name in ("reshard_table", "migrate_table", "prefill_table")
    }
    return replace(truth, **tables), _own_lengths(cell)


def lengths_wrong(cell: Cell, truth: LatencyModel, seed: int) -> tuple[LatencyModel, LengthModel]:
    """The length model of another data set."""
    del seed
    return truth, _fitted(cell.data, OTHER[cell.lengths], cell.known.cap)


def switches_dear(cell: Cell, truth: LatencyModel, seed: int) -> tuple[LatencyModel, LengthModel]:
    """The fixed part of every switch twenty times too low."""
    seconds = (TIMES_DEARER - 1) * cell.switch_s
    reshard = {pair: dear_s - seconds for pair, dear_s in truth.reshard_table.items()}
    return replace(truth, reshard_table=reshard), right(cell, truth, seed)[1]


def after_check(beliefs: Beliefs) -> Beliefs:
    def corrected(cell: Cell, truth: LatencyModel, seed: int) -> tuple[LatencyModel, LengthModel]:
        believed, lengths = beliefs(cell, truth, seed)
        noise = np.random.default_rng((seed, 6))

        def seen(table: str) -> dict:
            times = getattr(truth, table).items()
            return {key: s * noise.lognormal(0, CHECK_SPREAD) for key, s in times}

        tables = {table: rescaled(getattr(believed, table), seen(table)) for table in TABLES}
        return replace(believed, **tables), lengths

    return corrected


BELIEFS: dict[str, Beliefs] = {
    "right": right,
    "steps +-20 %, all alike": steps_wrong_alike,
    "steps +-20 %, by layout": steps_wrong_by_layout,
    "switch costs x3 or /3": switches_wrong,
    "lengths of another set": lengths_wrong,
    DEAR: switches_dear,
}
MISMEASURED = ("steps +-20 %, by layout", "switch costs x3 or /3", DEAR)
BELIEFS |= {checked(name): after_check(BELIEFS[name]) for name in MISMEASURED}


def run_cell(cell: Cell, num_replays: int, beliefs: Sequence[str]) -> dict[str, list]:
    """Seconds of every system in every replay of one cell; the planner holds each of `beliefs`.

    Of every other pair of the first replays (the beliefs of a pair are wrong in opposite ways) the
    rollout that follows is replayed as well.
    """
    cheap, dear = cell.machine(), replace(cell, switch_s=TIMES_DEARER * cell.switch_s).machine()
    wanted = {best_of(name) for name in beliefs}
    machines = {ORACLE: cheap} | ({DEAR_ORACLE: dear} if DEAR_ORACLE in wanted else {})
    seconds: dict[str, list] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    for seed in range(num_replays):
        workload, then = cell.rollouts(seed)
        goes_on = seed < FOLLOWED and seed % 4 < 2
        for name, machine in machines.items():
            note(name, oracle(workload, machine).total_s)
            if goes_on:
                note(following(name), oracle(then, machine).total_s)
        planners: dict[str, tuple[Planner, Machine]] = {
            name: (planner, cheap) for name, planner in baselines(cell, cheap.truth, seed).items()
        }
        for name in beliefs:
            machine = machines[best_of(name)]
            believed = BELIEFS[name](cell, machine.truth, seed)
            planners[name] = CostModelPlanner(SPLITS, *believed), machine
        for name, (planner, machine) in planners.items():
            note(name, replay(workload, planner, machine).total_s)
            if goes_on:
                learn(planner, workload)
                note(following(name), replay(then, planner, machine).total_s)
    return seconds


def baselines(cell: Cell, truth: LatencyModel, seed: int) -> dict[str, Planner]:
    """What the planner is compared with: all hold the right beliefs, as far as they hold any."""
    believed = right(cell, truth, seed)
    return {
        **{f"static tp{split.tp}": CostModelPlanner((split,), *believed) for split in SPLITS},
        "naive threshold": NaiveThreshold(SPLITS),
    }


def learn(planner: Planner, seen: Workload) -> None:
    """The lengths of a rollout that is over."""
    if isinstance(planner, CostModelPlanner):
        is_cut = seen.responses >= seen.cap
        planner.observe_rollout(planner.lengths.updated(seen.responses, is_cut, seen.prompt_id))
