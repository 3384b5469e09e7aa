"""Divides the responses of an iteration into the parts that models use as responses end.

Replays what a lane of a run does (`run/lanes.py`): its one thread reads responses and adds up
gradients. Either takes what waits for it, once that fills micro-batches or the rollout has ended.
Gradients need all responses to a prompt.
Knows when responses end and how they are packed. Does not know roles.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from operator import add
from typing import NamedTuple

import numpy as np

from pat_jax.profiling.capacity.update_batches import Packed
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.comparison import Replayed
from pat_jax.profiling.simulate.machine import Workload

Pack = Callable[[Workload], Packed]


@dataclass(frozen=True)
class EndedParts:
    """The parts of an iteration's responses, in the order in which a pass uses them.

    A part is packed by itself: all parts together have more padding than the whole batch, and may
    have prompts several times that it has once.
    """

    ready_s: tuple[float, ...] = ()  # when each part can begin
    slots: tuple[float, ...] = ()  # tokens with padding as shares of those of the whole batch
    pairs: tuple[float, ...] = ()  # of a query and a key, as shares of those of the whole batch
    micro: tuple[float, ...] = ()  # micro-batches as shares of those of the whole batch

    def seconds(self, whole: Seconds) -> tuple[float, ...]:
        """Divides the seconds of a pass over all responses. Every micro-batch sends as much as
        another one: weights are gathered for each."""
        by_tokens = whole.total - whole.attention - whole.links
        parts = zip(self.slots, self.pairs, self.micro, strict=True)
        return tuple(
            by_tokens * slots + whole.attention * pairs + whole.links * micro
            for slots, pairs, micro in parts
        )


class Streams(NamedTuple):
    """The parts that are read, and those of which gradients are added up."""

    reads: EndedParts
    gradients: EndedParts


def streams_of(
    replayed: Replayed, read: Pack, learn: Pack, reads: Seconds, gradients: Seconds
) -> Streams:
    """Replays the lane that is busiest with the responses of a rollout.

    Args:
      read, learn: pack responses into micro-batches that are read, or of which gradients are added.
      reads, gradients: all such passes of the lane over the whole batch, as `learn` packs it.
    """
    work = replayed.workload
    whole, groups = learn(work), _groups(work)
    readers, learners = _Queue(work, read, whole, reads), _Queue(work, learn, whole, gradients)
    readers.ready_s[:] = replayed.ended_s
    now = 0.0
    while readers.has_any or learners.has_any:
        is_over = now >= replayed.total_s
        taken = readers.take(now, is_over=is_over)
        if taken is not None:
            now += taken
            learners.ready_s = _complete(readers, groups, learners.ready_s, now)
            continue
        taken = learners.take(now, is_over=is_over and not readers.has_any)
        if taken is not None:
            now += taken
            continue
        times = np.concatenate([readers.times, learners.times, [replayed.total_s]])
        now = times[times > now].min()
    return Streams(readers.parts, learners.parts)


@dataclass
class _Queue:
    """Responses that wait for passes."""

    work: Workload
    pack: Pack
    whole: Packed
    passes: Seconds  # over `whole`
    parts: EndedParts = field(default_factory=EndedParts)

    def __post_init__(self):
        self.ready_s = np.full(self.work.size, np.inf)
        self.is_taken = np.zeros(self.work.size, bool)
        self._too_few = 0  # that wait, as was found

    @property
    def has_any(self) -> bool:
        return not self.is_taken.all()

    @property
    def times(self) -> np.ndarray:
        """When responses that have not been taken can be."""
        return self.ready_s[~self.is_taken]

    def take(self, now: float, *, is_over: bool) -> float | None:
        """Takes what waits. Returns the seconds of the passes; None: it is too little."""
        (some,) = np.nonzero((self.ready_s <= now) & ~self.is_taken)
        if not is_over and len(some) == self._too_few:
            return None
        packed = self.pack(self.work.only(some)) if len(some) else None
        if packed is None or not (packed.are_full or is_over):
            self._too_few = len(some)
            return None
        self.is_taken[some], self._too_few = True, 0
        whole = self.whole
        part = EndedParts(
            (float(self.ready_s[some].max()),),
            (packed.slots / whole.slots,),
            (sum(packed.pairs) / sum(whole.pairs),),
            (len(packed.shapes) / len(whole.shapes),),
        )
        self.parts = EndedParts(*map(add, astuple(self.parts), astuple(part)))
        return sum(part.seconds(self.passes))


def _complete(readers: _Queue, groups: np.ndarray, before: np.ndarray, now: float) -> np.ndarray:
    """Returns when all responses of each response's group were read, if that is known at `now`."""
    is_read = np.ones(groups.max() + 1, bool)
    np.logical_and.at(is_read, groups, readers.is_taken)
    return np.where(is_read[groups], np.minimum(before, now), before)


def _groups(work: Workload) -> np.ndarray:
    """Returns the number of each response's prompt, from 0."""
    if work.prompt_id is None:
        return np.arange(work.size)
    return np.unique(work.prompt_id, return_inverse=True)[1]
