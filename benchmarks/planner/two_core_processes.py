"""The processes of all placements on two cores, each on its cores, and their turns."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe, get_context
from pathlib import Path
from statistics import median
from typing import Any, get_args

from benchmarks.planner.two_core_case import Case, write_models
from benchmarks.planner.two_core_runs import Apart, InTurns, Rollouts, Turn, main_of_process
from pat_jax.profiling.placement.candidates import Overlap

SPAWNED = get_context("spawn")
FLATTEN = "flatten"
OVERLAPS: Sequence[Overlap] = get_args(Overlap)
SEPARATE = {overlap: f"separate, {overlap}" for overlap in OVERLAPS}
KNOWN = 2  # last rounds of the warm-up, from which an iteration is predicted


class Process:
    """A process of a run, on some cores."""

    def __init__(self, kind: type[InTurns], cores: Sequence[int], *given: Any, **links: Any):
        self.turns, links["turns"] = Pipe()
        arguments = (kind, *given, links)
        self.process = SPAWNED.Process(target=main_of_process, args=arguments, daemon=True)
        before = os.sched_getaffinity(0)
        # All threads of a process begin with the cores of the one that began it.
        os.sched_setaffinity(0, cores)
        self.process.start()
        os.sched_setaffinity(0, before)
        for one in links.values():
            one.close()  # else nobody would see that the other end has gone

    def __call__(self, asked: str) -> Any:
        self.turns.send(asked)
        return self.turns.recv()

    def end(self) -> None:
        self.process.kill()


class Systems:
    """All placements of one workload, each in its processes.

    Args:
      cache: folder of compiled programs, which are compiled for a number of cores.
      devices: numbers of devices that flatten is tried with.
    """

    def __init__(self, case: Case, folder: Path, cache: Path, devices: Sequence[int]):
        self.seen: dict[str, list[Turn]] = {}
        one, other = cores = sorted(os.sched_getaffinity(0))[:2]
        write_models(folder, case.model, prompts=4 * case.responses)
        asked = partial(case.options, folder)
        self.flat: dict[str, Process] = {}
        with environment(PAT_JAX_CACHE=str(cache / "two" / "xla"), NPROC="2"):
            for count in devices:
                told = asked(f"flatten{count}", "--devices", str(count))
                name = f"{FLATTEN}, devices: {count}"
                self.flat[name] = Process(InTurns, cores, told, case)
        ours, theirs = Pipe()
        with environment(PAT_JAX_CACHE=str(cache / "one" / "xla"), NPROC="1"):
            told = asked("rollouts", "--devices", "1")
            self.rollouts = Process(Rollouts, [one], told, case, link=ours)
            apart = [
                "--devices",
                "2",
                "--placement",
                "separate",
                "--placement.overlap",
                "gradients",
            ]
            self.apart = Process(Apart, [other], asked("apart", *apart), case, link=theirs)

    def by_name(self) -> Mapping[str, Callable[[object], float]]:
        """What makes an iteration, by placement."""
        flat = {name: (each, "none") for name, each in self.flat.items()}
        apart = {name: (self.apart, overlap) for overlap, name in SEPARATE.items()}
        return {name: partial(self._turn, name, *given) for name, given in (flat | apart).items()}

    def _turn(self, name: str, process: Process, overlap: str, batch: object) -> float:
        del batch  # each has its own
        turn = process(overlap)
        self.seen.setdefault(name, []).append(turn)
        return turn.seconds

    def seconds(self, name: str) -> float:
        """The median of the last iterations."""
        return median(turn.seconds for turn in self.seen[name][-KNOWN:])

    def clock(self, name: str) -> dict[str, float]:
        """The medians of the seconds of stages in the last iterations."""
        turns = self.seen[name][-KNOWN:]
        return {stage: median(turn.clock[stage] for turn in turns) for stage in turns[0].clock}

    def settle(self) -> dict[str, float]:
        """Goes on with the fastest way of flatten. Returns the seconds of all."""
        taken = {name: self.seconds(name) for name in self.flat}
        *slower, fastest = sorted(taken, key=lambda name: -taken[name])
        for name in slower:
            self.flat.pop(name).end()
            self.seen.pop(name)
        self.flat = {FLATTEN: self.flat.pop(fastest)}
        self.seen[FLATTEN] = self.seen.pop(fastest)
        return taken

    def end(self) -> None:
        every = *self.flat.values(), self.apart, self.rollouts
        for each in every:
            each.end()
        for each in every:  # their folders are removed next
            each.process.join()


@contextmanager
def environment(**changed: str) -> Iterator[None]:
    """So are these variables of the environment meanwhile, for processes that begin."""
    before = dict(os.environ)
    os.environ.update(changed)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
