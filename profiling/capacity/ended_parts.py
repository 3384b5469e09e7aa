"""Divides the responses of an iteration into the parts that models read as responses end.

Knows when responses end and how they are packed. Does not know roles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from pat_jax.profiling.capacity.update_batches import Packed
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.comparison import Replayed
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.rl.batches.packing import FULL


@dataclass(frozen=True)
class EndedParts:
    """The parts of an iteration's responses in the order in which they end.

    A part is packed by itself, so that all parts together have more padding than the whole batch.
    """

    ended_s: tuple[float, ...]  # when all responses of each part have ended
    slots: np.ndarray  # float[parts], tokens with padding as shares of those of the whole batch
    pairs: np.ndarray  # float[parts], shares of all pairs of a query and a key
    micro: np.ndarray  # float[parts], micro-batches as shares of those of the whole batch

    @classmethod
    def of(
        cls,
        replayed: Replayed,
        pack: Callable[[Workload], Packed],
        passes: Seconds,
        *,
        by_group: bool,
    ) -> Self:
        """Gathers responses as a run does: while the devices are busy, and until they fill
        micro-batches or the rollout has ended.

        Args:
          pack: packs responses into micro-batches.
          passes: all passes over the whole batch on the devices that are busiest with them.
          by_group: responses are used once all of their prompt have ended.
        """
        work, whole = replayed.workload, pack(replayed.workload)
        ended_s = _by_group(replayed) if by_group else replayed.ended_s
        order = np.argsort(ended_s, kind="stable")
        times, tokens = ended_s[order], (work.prompts + work.responses)[order].astype(float)
        shares = tokens**2 / (tokens**2).sum()
        ends, found, free_s = [0], cls((), *np.zeros((3, 0))), 0.0
        while (begin := ends[-1]) < len(order):
            end, packed = begin, None
            while packed is None or (end < len(order) and packed.fill < FULL):
                end = int(np.searchsorted(times, max(free_s, times[end]), side="right"))
                packed = pack(work.only(order[begin:end]))
            part = cls(
                (float(times[end - 1]),),
                np.array([packed.slots / whole.slots]),
                shares[begin:end].sum(keepdims=True),
                np.array([len(packed.shapes) / len(whole.shapes)]),
            )
            free_s = max(free_s, times[end - 1]) + sum(part.seconds(passes))
            found = found.joined(part)
            ends.append(end)
        return found

    def joined(self, other: Self) -> Self:
        return type(self)(
            self.ended_s + other.ended_s,
            np.concatenate([self.slots, other.slots]),
            np.concatenate([self.pairs, other.pairs]),
            np.concatenate([self.micro, other.micro]),
        )

    def seconds(self, whole: Seconds) -> tuple[float, ...]:
        """Divides the seconds of a pass over all responses. Every micro-batch sends as much as
        another one: weights are gathered for each."""
        by_tokens = whole.total - whole.attention - whole.links
        each = by_tokens * self.slots + whole.attention * self.pairs + whole.links * self.micro
        return tuple(each.tolist())


def _by_group(replayed: Replayed) -> np.ndarray:
    """Returns when all responses to the prompt of each response have ended, in seconds."""
    work, ended_s = replayed.workload, replayed.ended_s
    if work.prompt_id is None:
        return ended_s
    _, group = np.unique(work.prompt_id, return_inverse=True)
    last = np.zeros(group.max() + 1)
    np.maximum.at(last, group, ended_s)
    return last[group]
