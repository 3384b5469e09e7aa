"""The best path in hindsight: what a planner that knew every response length could have done.

Dynamic programming over (moment x state), with the true lengths and the true costs. A state is a
layout and who shares a group with whom:

    risen   dealt out in the layout of the start and merged since by migration: the groups are known
            exactly, whenever the switches happened
    even    anything else (recomputed, all or some, gone down and up again, or moved between the
            groups of a layout): taken to be spread perfectly evenly from then on, which no real
            path beats

So the result is exact for every path that only rises by migration, and a lower bound for the others:
no planner that follows the engine's rules is faster.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pat_jax.planning.costs import LARGE_S
from pat_jax.planning.types import Split
from pat_jax.profiling.machine import Machine, Workload


@dataclass(frozen=True)
class Hindsight:
    total_s: float
    start: Split
    switches: tuple[tuple[int, Split], ...]  # (decode step, layout switched to)
    evened: tuple[int, ...]  # decode steps at which sequences go to other groups
    is_exact: bool  # the path rises by migration only: the engine can follow it


@dataclass(frozen=True)
class _State:
    split: Split
    dealt: Split | None  # the layout of the start; None: even


def clairvoyant(workload: Workload, machine: Machine) -> Hindsight:
    """The cheapest path, switches allowed at every test of the stop condition."""
    world = _World(workload, machine)
    states = [
        _State(split, dealt)
        for dealt in (*machine.splits, None)
        for split in machine.splits
        if dealt is None or split.tp >= dealt.tp
    ]
    fullest = np.stack([world.fullest(state) for state in states])
    run = np.stack([world.decode(s.split, n) for s, n in zip(states, fullest, strict=True)])
    moves = np.full((len(world.moments), len(states), len(states)), np.inf)
    for a, source in enumerate(states):
        moves[:, a, a] = 0.0
        for b, target in enumerate(states):
            for seconds in world.ways(source, target, fullest[a]):
                moves[:, a, b] = np.minimum(moves[:, a, b], seconds)
    after, choices = np.zeros(len(states)), np.empty(moves.shape[:2], int)
    for t in range(len(world.moments) - 1, -1, -1):
        options = moves[t] + (run[:, t] + after)
        choices[t] = options.argmin(axis=1)
        after = options.min(axis=1)
    return _follow(world, states, after, choices)


def _follow(
    world: "_World", states: list[_State], totals: np.ndarray, choices: np.ndarray
) -> Hindsight:
    prefill = {split: world.prefill(split) for split in world.machine.splits}
    starts = [i for i, state in enumerate(states) if state.split == state.dealt]
    at = min(starts, key=lambda i: totals[i] + prefill[states[i].split])
    total, start, path = float(totals[at] + prefill[states[at].split]), states[at].split, [at]
    switches, evened = [], []
    for moment, choice in zip(world.moments.tolist(), choices, strict=True):
        if choice[at] == at:
            continue
        before, at = states[at].split, int(choice[at])
        path.append(at)
        if states[at].split == before:
            evened.append(moment)
        else:
            switches.append((moment, states[at].split))
    is_exact = all(states[i].dealt is not None for i in path)
    return Hindsight(total, start, tuple(switches), tuple(evened), is_exact)


class _World:
    """The costs of one rollout at every moment, int[moments] decode steps from its start."""

    def __init__(self, workload: Workload, machine: Machine):
        self.workload, self.machine, self.truth = workload, machine, machine.truth
        every = machine.check_every
        self.moments = np.arange(0, int(workload.responses.max()), every)
        self.responses = np.sort(workload.responses)
        self.live = self._live(self.responses)
        longest_last = np.argsort(workload.responses, kind="stable")
        longest_prompt = np.maximum.accumulate(workload.prompts[longest_last][::-1])[::-1]
        self.longest_prompt = longest_prompt[workload.size - self.live]  # of those still live
        self.context = self.longest_prompt + self.moments - 1  # tokens in the longest cache
        shortest = np.minimum.accumulate(workload.prompts[longest_last][::-1])[::-1]
        self.least_context = shortest[workload.size - self.live] + self.moments - 1
        mean_prompt = np.cumsum(workload.prompts[longest_last][::-1])[::-1] / np.arange(
            workload.size, 0, -1
        )
        self.mean_context = mean_prompt[workload.size - self.live] + self.moments - 1
        self.length = self._lengths(every)
        self.recompute = {split: self._recompute(split) for split in machine.splits}

    def fullest(self, state: _State) -> np.ndarray:
        """Live sequences of the fullest group."""
        if state.dealt is None:
            return -(-self.live // state.split.dp)
        turn = np.arange(self.workload.size)
        group = turn // -(-self.workload.size // state.dealt.dp) % state.split.dp
        responses = self.workload.responses
        members = [np.sort(responses[group == g]) for g in range(state.split.dp)]
        return np.max([self._live(ends) for ends in members], axis=0)

    def decode(self, split: Split, fullest: np.ndarray) -> np.ndarray:
        """Seconds until the next moment."""
        rows = np.array(self.machine.buckets.rows[split])
        rows = rows[np.searchsorted(rows, fullest)]
        memory, length = self.machine.memory, self.length
        seconds = np.full(len(rows), LARGE_S)  # where there is no room
        fits = np.ones(len(rows), bool)
        if memory is not None:
            fits = memory.holds(split, fullest, self.context + self.machine.check_every)
        if fits.any():
            step = _looked_up(
                lambda n, m: self.truth.decode_step(split, n, m), rows[fits], length[fits]
            )
            step += self.machine.host_s_per_sequence * self.live[fits]
            seconds[fits] = self.machine.check_every * step
        return seconds

    def ways(self, source: _State, target: _State, fullest: np.ndarray) -> Iterator[np.ndarray]:
        """Seconds of each way from one state to another, at every moment."""
        a, b = source.split, target.split
        if a == b:
            is_measured = self.truth.shift_round(a) < math.inf
            if source.dealt is not None and target.dealt is None and is_measured:
                yield self._shift(a, fullest)
            return
        reslice, is_up = self.truth.reslice(a, b), b.tp > a.tp
        if source.dealt == target.dealt if is_up else target.dealt is None:
            pages = self.truth.migrate(a, b, fullest, self.live, self.mean_context)
            yield np.asarray(reslice + pages)
        if target.dealt is None:
            yield reslice + self.recompute[b]
            yield reslice + self._mixed(a, b)

    def _shift(self, split: Split, fullest: np.ndarray) -> np.ndarray:
        """What moves between the groups of a layout cost at least.

        They are made for a smaller row bucket. Sequences that the fullest group has too many for it
        leave one after another, each as short as the shortest, in however many directions.
        """
        rows = np.array([0, *self.machine.buckets.rows[split]])
        fewer = rows[np.searchsorted(rows, fullest) - 1]
        rounds = np.ceil((fullest - fewer) * self.least_context / self.truth.round_tokens)
        is_possible = -(-self.live // split.dp) <= fewer
        return np.where(is_possible, rounds * self.truth.shift_round(split), np.inf)

    def _mixed(self, source: Split, target: Split) -> np.ndarray:
        """What recomputing some sequences and migrating the others costs at least.

        Every sequence is either a share of the calls of a full prefill, as short as the shortest, or
        of the rounds of groups that are alike; and there is one call.
        """
        truth, groups = self.truth, max(source.dp, target.dp)
        one_call = min(truth.prefill_call(target, n) for n in truth.prefill[target].lengths)
        pages = self.live / target.dp * -(-self.least_context // truth.page_size)
        calls = one_call * pages / truth.prefill_blocks
        even = self.live / groups
        rounds = truth.migrate(source, target, even, self.live, self.least_context)
        return np.maximum(one_call, np.minimum(calls, rounds))

    def prefill(self, split: Split) -> float:
        return self.truth.recompute(
            split, -(-self.workload.size // split.dp), int(self.workload.prompts.max())
        )

    def _live(self, ends: np.ndarray) -> np.ndarray:
        """How many of `ends`, ascending response lengths, are still to come at each moment."""
        return len(ends) - np.searchsorted(ends, self.moments, side="right")

    def _lengths(self, every: int) -> np.ndarray:
        """The length bucket of the longest context and `every` more tokens."""
        steps = np.array(self.machine.buckets.lengths)
        last_end = self.longest_prompt + self.workload.cap
        needed = np.searchsorted(steps, np.minimum(last_end - 1, self.context + every))
        return steps[needed]

    def _recompute(self, split: Split) -> np.ndarray:
        rows = -(-self.live // split.dp)
        return _looked_up(lambda n, m: self.truth.recompute(split, n, m), rows, self.context)


def _looked_up(
    seconds: Callable[[int, int], float], rows: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """`seconds(rows, tokens)` at every moment, each distinct question asked once."""
    keys = rows * (int(tokens.max()) + 1) + tokens
    _, first, where = np.unique(keys, return_index=True, return_inverse=True)
    return np.array([seconds(int(rows[i]), int(tokens[i])) for i in first])[where]
