"""Whether the samples of a prompt begin one after the other where sequences wait, so that later ones draft
from whole siblings: the order, and what it is expected to save.

Knows lengths, rows and what whole siblings are worth. Does not know what a step costs: see `stagger_prices.py`.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from pat_jax.planning.lengths.model import LengthModel, mean_moments
from pat_jax.planning.types import Load

# So many samples of each prompt begin one after the other; the rest, as they would, when they have. With all
# of them one after the other the last sample of the longest prompt begins last of all: counted on real texts
# the rollout then has up to a third more steps, and but 2 % fewer of single rows (`python -m
# benchmarks.staggered_samples`).
LEADERS = 4
# In its first tokens a response has little of its own to draft from: more of their drafts are right where siblings
# had ended before it began, for each doubling of their number and one. Fitted to what the order saves on recorded
# responses (by the same benchmark: within 3 points for a policy in RL and five reasoning models; nearly equal samples
# gain more); second, of the policy in RL where it drafts from 400 updates old responses as well.
FIRST_TOKENS = 512
WORTH, WORTH_BESIDE_EARLIER = 0.15, 0.02


def staggered(order: np.ndarray, prompt: np.ndarray, leaders: int = LEADERS) -> np.ndarray:
    """The first sample of each prompt first, then the second, up to so many `leaders`; otherwise as before.

    Args:
      order: int[waiting], sequences.
      prompt: int[sequences], equal for samples of a prompt.
    """
    of_prompt = np.argsort(prompt[order], kind="stable")
    ordered = prompt[order][of_prompt]
    turn = np.empty(len(order), np.int64)
    turn[of_prompt] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return order[np.argsort(np.minimum(turn, leaders), kind="stable")]


def times_right(whole: np.ndarray, has_earlier: np.ndarray) -> np.ndarray:
    """How many times as many tokens of drafts are right in its first tokens, float[sequences].

    Args:
      whole: int[sequences], siblings that had ended when each began.
      has_earlier: bool[sequences], it drafts from earlier responses as well.
    """
    return 1 + np.where(has_earlier, WORTH_BESIDE_EARLIER, WORTH) * np.log2(1 + whole)


@dataclass(frozen=True)
class Queue:
    """The sequences of a rollout before any has begun."""

    load: Load  # of all of them, as though each had a row
    order: np.ndarray  # int[sequences], in which they get rows
    prompt: np.ndarray  # int[sequences], equal for samples of a prompt
    has_earlier: np.ndarray  # bool[sequences], see `times_right`
    rows: int  # of all groups

    @property
    def staggered(self) -> np.ndarray:
        return staggered(self.order, self.prompt)

    def drawn(self, lengths: LengthModel) -> np.ndarray:
        """Tokens that each response may come to, float[sequences]: drawn, the same each time."""
        load = self.load
        moments = np.append(mean_moments(int(load.budget.max())), load.budget.max())
        alive = lengths.survival(np.zeros(1, int), moments[-1:] + 1, moments)[0]
        chance = np.random.default_rng(0).random(load.live)
        # From the last moment backwards, where the curve rises.
        place = len(alive) - np.searchsorted(alive[::-1], chance, side="right")
        return np.clip(moments[np.minimum(place, len(moments) - 1)], 1, load.budget).astype(float)


@dataclass(frozen=True)
class Schedule:
    """When each sequence has a row, in tokens that one says meanwhile which began without whole siblings."""

    queue: Queue
    lengths: np.ndarray  # float[sequences], tokens of the responses
    begin: np.ndarray  # float[sequences]
    end: np.ndarray  # float[sequences]
    whole: np.ndarray  # int[sequences], siblings that had ended when it began
    num_alone: int  # that began while no sibling had a row: nobody holds the pages of their prompt

    @classmethod
    def of(
        cls, queue: Queue, order: np.ndarray, lengths: np.ndarray, rows: int, right: float
    ) -> "Schedule":
        """Rows are filled as they become free.

        Args:
          right: tokens of drafts that are right in a step of a row without whole siblings.
        """
        most = times_right(np.arange(1 + len(order)), np.zeros(1 + len(order), bool))
        least = times_right(np.arange(1 + len(order)), np.ones(1 + len(order), bool))
        begin, end = np.zeros((2, len(order)))
        whole, num_alone = np.zeros(len(order), np.int64), 0
        free, ends = [0.0] * rows, [[] for _ in range(int(queue.prompt.max()) + 1)]
        for i in order.tolist():
            now, of_siblings = free[0], ends[queue.prompt[i]]
            ended = sum(then <= now for then in of_siblings)
            num_alone += ended == len(of_siblings)
            times = (least if queue.has_earlier[i] else most)[ended]
            first = min(lengths[i], FIRST_TOKENS)
            took = lengths[i] - first + first * (1 + right) / (1 + right * times)
            begin[i], end[i], whole[i] = now, now + took, ended
            of_siblings.append(now + took)
            heapq.heapreplace(free, now + took)
        return cls(queue, lengths, begin, end, whole, num_alone)

    @cached_property
    def last(self) -> float:
        return float(self.end.max())

    @property
    def row_steps(self) -> float:
        return float((self.end - self.begin).sum())

    def at(self, edges: np.ndarray) -> np.ndarray:
        """Between each two edges: live sequences, tokens in the cache of one, and of the longest;
        float[3, moments]."""
        moments = [self._between(*pair) for pair in pairwise(edges)]
        return np.array(moments).T

    def _between(self, start: float, stop: float) -> tuple[float, float, float]:
        first, last = np.maximum(self.begin, start), np.minimum(self.end, stop)
        live = np.flatnonzero(last > first)
        first, last, begin = first[live], last[live], self.begin[live]
        pace = self.lengths[live] / (self.end[live] - begin)
        before = self.queue.load.context[live] - begin * pace
        lives = last - first
        mean = float(lives @ (before + (first + last) / 2 * pace)) / max(float(lives.sum()), 1e-9)
        longest = float((before + last * pace).max(initial=0.0))
        return float(lives.sum()) / (stop - start), mean, longest
