"""Which programs a rollout has compiled while it goes on, where they were not all compiled before it.

A burst runs in the smallest compiled bucket that holds it; where none does, the bucket that fits is compiled
at once. A larger bucket costs time in every burst. Once these bursts have taken as long as a program takes
to compile, the one that fits is compiled beside the run: to rent until the rent has come to the price costs
at most twice what would have been best (Karlin, Manasse, Rudolph and Sleator 1988).
"""

from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from pat_jax.engine.device.programs import Key, ProgramTable
from pat_jax.planning.types import Split

MOST_WASTE = 4  # times the rows and columns that fit: a larger bucket takes memory as well


class Shape(NamedTuple):
    """Of a burst: what its program is compiled for."""

    split: Split
    rows: int  # bucket of a group
    length: int  # tokens that a row's cache may come to hold
    budget: int = 0  # tokens of drafts that a step has room for, for each row

    @property
    def key(self) -> Key:
        return Key("decode", self.split, self.rows, self.length, budget=self.budget)

    @property
    def area(self) -> int:
        return self.rows * self.length


class ByNeed:
    """The decode programs of one engine, over all of its rollouts."""

    def __init__(self, programs: ProgramTable):
        self.programs = programs
        self._rent: defaultdict[Key, float] = defaultdict(float)  # seconds
        self._jobs: dict[Key, Future[None]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compile-by-need")

    def has(self, shape: Shape) -> bool:
        """Whether its program is compiled.

        Raises:
          Exception: whatever compiling it beside the run has raised.
        """
        job = self._jobs.get(shape.key)
        if job is not None and job.done():
            job.result()
        return shape.key in self.programs

    def charge(self, shape: Shape, seconds: float) -> None:
        """Counts a burst that would have run in `shape`, and took so long in a larger bucket."""
        key = shape.key
        self._rent[key] += seconds
        is_free = all(job.done() for job in self._jobs.values())  # who ends waits for one at most
        if is_free and key not in self._jobs and self._rent[key] >= self._price_s:
            self._jobs[key] = self._pool.submit(self.programs.compile, key)

    @property
    def _price_s(self) -> float:
        """What decode programs have taken to compile, at most."""
        seen = list(self.programs.compile_seconds.items())
        return max((seconds for key, seconds in seen if key.name == "decode"), default=0.0)
