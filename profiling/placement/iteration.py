"""What an iteration has to do under one placement: values that `schedule.py` puts in order."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pat_jax.planning.placement import Positions


@dataclass(frozen=True)
class Stage:
    """A stage after the rollout or beside it."""

    name: str
    devices: Positions
    seconds: tuple[float, ...]  # of each part of the responses
    needs: tuple[str, ...] = ()  # stages that end before it begins, if it runs in one piece
    # When each part can begin, while responses are generated; empty: it runs in one piece.
    ready_s: tuple[float, ...] = ()

    @property
    def total_s(self) -> float:
        return sum(self.seconds)


@dataclass(frozen=True)
class Iteration:
    """The rollout of an iteration, and its other stages in the order in which a run launches
    them."""

    devices: Positions  # of the rollout
    rollout_s: float
    stages: tuple[Stage, ...]
    # Seconds of stages beside the rollout, on devices that it has left, by name; part of its own.
    beside: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """When a stage ran, and where."""

    name: str
    devices: Positions
    begin_s: float
    end_s: float
    busy_s: float  # without waits between its parts


@dataclass(frozen=True)
class Schedule:
    """The stages of an iteration in time."""

    seconds: float
    spans: tuple[Span, ...]  # the rollout first, the others as a run launches them
    # Seconds of each stage on the path that no more devices elsewhere would shorten.
    path: Mapping[str, float]
    beside: Mapping[str, float] = field(default_factory=dict)  # as in the iteration

    @property
    def stage_s(self) -> dict[str, float]:
        """Seconds of each stage, on whatever devices."""
        return {x.name: x.busy_s + self.beside.get(x.name, 0.0) for x in self.spans}

    @property
    def bound(self) -> str:
        """The stage with the largest share of that path."""
        return max(self.path, key=lambda name: self.path[name])

    def busy_s(self, device: int) -> float:
        """Seconds in which a device computes."""
        return sum(span.busy_s for span in self.spans if device in span.devices)

    def end_s(self, name: str) -> float:
        return next(span.end_s for span in self.spans if span.name == name)
