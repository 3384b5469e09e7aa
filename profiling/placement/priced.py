"""Candidates with their prices, and the one that is chosen: values of a plan's report.

Knows seconds and bytes. Does not know how they were found.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pat_jax.common.text_table import percent
from pat_jax.planning.placement import Positions
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.placement.factors import Factors
from pat_jax.profiling.placement.iteration import Schedule

ERROR = 0.10  # share by which predicted times may be wrong against one another
ALIKE = 0.01  # of candidates that differ by less, the one with the fewest parts is chosen
SHOWN = 5  # fastest candidates that a table has beside those with names


@dataclass(frozen=True)
class PartMemory:
    """Bytes of a device of one part, in the stage that takes most."""

    devices: Positions
    stage: str
    num_bytes: int


@dataclass(frozen=True)
class Priced:
    """A candidate: what an iteration takes, or why it cannot run."""

    name: str
    memory: tuple[PartMemory, ...]
    candidate: Candidate
    seconds: float | None = None  # of an iteration, the mean; None: it cannot run
    bound: str = ""  # the stage that takes most of an iteration's longest path
    bound_share: float = 0.0  # of that path
    schedule: Schedule | None = None  # of the first iteration
    refusal: str = ""  # why it cannot run
    is_named: bool = False  # flatten, interleave, separate or split
    rest: Literal["device", "host"] = "device"  # where models wait that no stage needs
    # Seconds if all that flatten has not takes longer by the error of prices; None: all of it may.
    worst_s: float | None = None

    @property
    def num_parts(self) -> int:
        return len(self.memory)

    def at_worst(self, error: float) -> float:
        """Seconds if its prices are too low by `error`, and those of flatten are right."""
        assert self.seconds is not None, "it can run"
        return (1 + error) * self.seconds if self.worst_s is None else self.worst_s


@dataclass(frozen=True)
class PriceSources:
    """Where the seconds of prices are from."""

    has_profile: bool = False  # whether those of rollouts are from a profile
    iteration: str = ""  # the file of the measured iteration; empty: there is none
    factors: Factors = field(default_factory=Factors)  # of its stages


@dataclass(frozen=True)
class Placements:
    """The candidates of a run, and the choice."""

    candidates: tuple[Priced, ...]  # flatten first
    error: float  # share by which predicted times may be wrong
    streams_gradients: bool  # whether gradients can begin before the rollout has ended
    num_considered: int  # candidates, those that could not be the fastest among them
    num_cuts: int = 1  # equal groups of devices that are cut alike: numbers are within one
    sources: PriceSources = field(default_factory=PriceSources)

    @property
    def flatten(self) -> Priced:
        return self.candidates[0]

    @property
    def has_split(self) -> bool:
        """Whether a candidate gives models whole hosts."""
        return any(one.name == "split" for one in self.candidates)

    @property
    def fastest(self) -> Priced | None:
        """The fastest candidate; of several that are about as fast, the one with the fewest
        parts."""
        return _fastest(self.candidates)

    @property
    def chosen(self) -> Priced:
        """The placement of `--placement auto`: flatten, unless another one is faster by more than
        prices may be wrong, or flatten has no room."""
        usable, now = [x for x in self.candidates if x.seconds is not None], self.flatten.seconds
        if now is not None:
            usable = [one for one in usable if one.at_worst(self.error) < now]
        return _fastest(usable) or self.flatten

    def gain(self, one: Priced) -> float:
        """Returns by which share of its own time flatten takes longer than this candidate; 0 if
        either cannot run."""
        if one.seconds is None or self.flatten.seconds is None:
            return 0.0
        return self.flatten.seconds / one.seconds - 1

    @property
    def reason(self) -> str:
        """The choice and its reason, in a sentence."""
        chosen, fastest = self.chosen, self.fastest
        if fastest is None:
            return f"No placement has room: {self.flatten.refusal}."
        if self.flatten.seconds is None:
            return f"{chosen.name}: flatten has no room ({self.flatten.refusal})."
        if chosen is not self.flatten:
            more = f"more than the {percent(self.error)} that prices may be wrong"
            if chosen.worst_s is not None:
                more = f"even if all on halves of the devices takes {percent(self.error)} longer"
            return (
                f"{chosen.name}: an iteration is predicted to be {1 + self.gain(chosen):.2f} times as fast as "
                f"with flatten, {more}."
            )
        if self.num_considered == 1:
            return "flatten: there is no other placement of these devices."
        if fastest is self.flatten:
            return "flatten: no other placement is predicted to be faster."
        return (
            f"flatten: the fastest other placement ({fastest.name}) is predicted to be "
            f"{1 + self.gain(fastest):.2f} times as fast, and prices may be wrong by {percent(self.error)}."
        )

    def shown(self) -> Iterator[Priced]:
        """Yields the candidates of a table: those with names, then the fastest others."""
        named = [one for one in self.candidates if one.is_named]
        yield from named
        rest = [one for one in self.candidates if not one.is_named and one.seconds is not None]
        yield from sorted(rest, key=lambda one: one.seconds or 0.0)[:SHOWN]


def _fastest(candidates: Sequence[Priced]) -> Priced | None:
    usable = [(one, one.seconds) for one in candidates if one.seconds is not None]
    if not usable:
        return None
    least = min(seconds for _, seconds in usable)
    alike = [pair for pair in usable if pair[1] <= (1 + ALIKE) * least]
    return min(alike, key=lambda pair: (pair[0].num_parts, pair[1]))[0]


def mean_path(schedules: Sequence[Schedule]) -> Mapping[str, float]:
    """Returns the seconds of each stage on the longest paths of all iterations together."""
    found: dict[str, float] = {}
    for schedule in schedules:
        for name, seconds in schedule.path.items():
            found[name] = found.get(name, 0.0) + seconds
    return found
