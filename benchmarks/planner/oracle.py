"""The oracle: the best path that a planner could have taken had it known every response length.

Dynamic programming over (moment x state), with the true lengths and the true costs. A moment is a
decode step at which the stop condition is tested. A state is a layout, and the way in which
sequences are spread over its replicas:

    risen   placed in the first layout, and since then merged by migration only: the replica of each
            sequence is known exactly, whenever the switches happened
    even    anything else (all or some recomputed, TP lowered and raised again, or moved between the
            replicas of a layout): assumed to be spread perfectly evenly from then on, which no real
            path beats

So the result is exact for every path that only raises TP by migration, and a lower bound for the
others: no planner that follows the engine's rules is faster. All sequences have pages in every
layout. So if sequences have to wait for pages, no planner can reach the result. It knows nothing of
drafts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

import numpy as np

from pat_jax.planning.held import most_held
from pat_jax.planning.planner.costs import CostTables
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import waiting

CHUNK = 256  # moments that are computed together for all sequences


@dataclass(frozen=True)
class Oracle:
    total_s: float
    start: Split
    switches: tuple[tuple[int, Split], ...]  # (decode step, layout after the switch)
    evened: tuple[int, ...]  # decode steps at which sequences go to other replicas
    is_exact: bool  # the path only raises TP by migration: the engine can follow it


@dataclass(frozen=True)
class _State:
    split: Split
    dealt: Split | None  # the first layout of a risen state; None: an even state


def oracle(workload: Workload, machine: Machine) -> Oracle:
    """Returns the cheapest path. Switches are allowed at every test of the stop condition."""
    world = _World(workload, machine)
    states = [
        _State(split, dealt)
        for dealt in (*machine.splits, None)
        for split in machine.splits
        if dealt is None or split.tp >= dealt.tp
    ]
    fullest = np.stack([world.fullest(state) for state in states])
    run = np.stack([world.decode(state, n) for state, n in zip(states, fullest, strict=True)])
    moves = np.full((len(world.moments), len(states), len(states)), np.inf)
    for a, source in enumerate(states):
        moves[:, a, a] = 0.0
        for b, target in enumerate(states):
            for seconds in world.ways(source, target, fullest[a]):
                moves[:, a, b] = np.minimum(moves[:, a, b], seconds)
    after = np.zeros(len(states))
    choices = np.empty(moves.shape[:2], int)
    for t in range(len(world.moments) - 1, -1, -1):
        options = moves[t] + (run[:, t] + after)
        choices[t] = options.argmin(axis=1)
        after = options.min(axis=1)
    return _follow(world, states, after, choices)


def _follow(
    world: "_World", states: list[_State], totals: np.ndarray, choices: np.ndarray
) -> Oracle:
    prefill = {split: world.prefill(split) for split in world.machine.splits}
    starts = [i for i, state in enumerate(states) if state.split == state.dealt]
    at = min(starts, key=lambda i: totals[i] + prefill[states[i].split])
    total = float(totals[at] + prefill[states[at].split])
    start = states[at].split
    path = [at]
    switches, evened = [], []
    for moment, choice in zip(world.moments.tolist(), choices, strict=True):
        if choice[at] == at:
            continue
        before = states[at].split
        at = int(choice[at])
        path.append(at)
        if states[at].split == before:
            evened.append(moment)
        else:
            switches.append((moment, states[at].split))
    is_exact = all(states[i].dealt is not None for i in path)
    return Oracle(total, start, tuple(switches), tuple(evened), is_exact)


class _World:
    """The costs of one rollout at each moment: a decode step at which the stop condition is
    tested."""

    def __init__(self, workload: Workload, machine: Machine):
        self.workload = workload
        self.machine = machine
        self.truth = machine.truth
        self.num_rows = min(workload.size, machine.capacity)
        self.begin, self.row = _seats(workload.responses, self.num_rows)
        self.end = self.begin + workload.responses
        self.moments = np.arange(0, int(self.end.max()), machine.check_every)
        self.running = self._running(np.ones(workload.size, bool))
        ahead = workload.prompts - self.begin - 1  # plus the moment: tokens in the cache of each
        # Tokens in the KV cache of the longest running sequence, of the shortest, and on average.
        self.context = self._of_running(np.maximum, ahead) + self.moments
        self.least_context = self._of_running(np.minimum, ahead) + self.moments
        self.mean_context = self._of_running(np.add, ahead) / self.running + self.moments
        self.length = self._lengths()
        self.dealt = {split: self._dealt(split) for split in machine.splits}
        self.recompute = {split: self._recompute(split) for split in machine.splits}

    @property
    def has_queue(self) -> bool:
        return self.num_rows < self.workload.size

    def _dealt(self, split: Split) -> np.ndarray:
        """Returns the replica of each row at the start, int[rows], as the cache manager places
        sequences. With a queue, sequences may begin in another order: row i may not be sequence
        i's."""
        scheduler = waiting(self.workload, replace(self.machine, memory=None), split)
        scheduler.admit()
        return scheduler.table.replica(scheduler.table.running)

    def _of_running(self, which: np.ufunc, value: np.ndarray) -> np.ndarray:
        """Returns maximum, minimum or sum of `value`, over those that run at each moment."""
        least = np.iinfo(np.int64).min
        most = np.iinfo(np.int64).max
        nothing = {np.maximum: least, np.minimum: most, np.add: 0}[which]
        parts = []
        for some in np.array_split(self.moments, -(-len(self.moments) // CHUNK)):
            is_running = (self.begin <= some[:, None]) & (some[:, None] < self.end)
            parts.append(which.reduce(np.where(is_running, value, nothing), axis=1))
        return np.concatenate(parts)

    def fullest(self, state: _State) -> np.ndarray:
        if state.dealt is None:
            return -(-self.running // state.split.dp)
        replica = self._replica(state)
        return np.max([self._running(replica == g) for g in range(state.split.dp)], axis=0)

    def _replica(self, state: _State) -> np.ndarray:
        """Returns the replica of each sequence, int[sequences]; all 0 in an even state."""
        if state.dealt is None:
            return np.zeros(self.workload.size, int)
        return self.dealt[state.dealt][self.row] % state.split.dp

    def _held(self, state: _State) -> np.ndarray:
        """Returns mean cached tokens of the replica with most, until the next moment."""
        if self.has_queue:
            return self.running * self.mean_context / state.split.dp
        prompts = self.workload.prompts
        responses = self.workload.responses
        every = self.machine.check_every
        replica = self._replica(state)
        most = most_held(prompts - 1, responses, replica, every * len(self.moments), every)
        return most / (state.split.dp if state.dealt is None else 1)

    def decode(self, state: _State, fullest: np.ndarray) -> np.ndarray:
        """Returns the seconds until the next moment, if all sequences have rows and pages."""
        split = state.split
        held = self._held(state)
        buckets = np.array(self.machine.buckets.rows[split])
        rows = buckets[np.searchsorted(buckets, fullest)]
        tables = CostTables.of(self.truth, (split,))
        step = tables.steps(rows[None], self.length, held / rows, self.running[None])[0]
        step += self.machine.host_s_per_sequence * self.running
        return self.machine.check_every * step

    def ways(self, source: _State, target: _State, fullest: np.ndarray) -> Iterator[np.ndarray]:
        a = source.split
        b = target.split
        if a == b:
            is_measured = self.truth.shift_round(a) < math.inf
            if source.dealt is not None and target.dealt is None and is_measured:
                yield self._shift(a, fullest)
            return
        reshard = self.truth.reshard_table[a, b]
        is_up = b.tp > a.tp
        if source.dealt == target.dealt if is_up else target.dealt is None:
            pages = self.truth.migrate(a, b, fullest, self.running, self.mean_context)
            yield np.asarray(reshard + pages)
        if target.dealt is None:
            yield reshard + self.recompute[b]
            yield reshard + self._mixed(a, b)

    def _shift(self, split: Split, fullest: np.ndarray) -> np.ndarray:
        """Returns the least seconds of a move between the replicas of a layout. A move leads to a
        smaller row bucket, or to replicas as even as possible. The surplus sequences of the fullest
        replica are priced as short as the shortest, one after another."""
        rows = np.array([0, *self.machine.buckets.rows[split]])
        fewer = np.maximum(rows[np.searchsorted(rows, fullest) - 1], -(-self.running // split.dp))
        rounds = (fullest - fewer) * self.least_context / self.truth.round_tokens
        rounds = np.maximum(rounds, 1.0)
        return np.where(fewer < fullest, rounds * self.truth.shift_round(split), np.inf)

    def _mixed(self, source: Split, target: Split) -> np.ndarray:
        """Returns the least seconds to recompute some sequences and migrate the others. Every
        sequence is priced as short as the shortest: by its share of the calls of a full prefill, or
        of the rounds between even replicas. There is at least one call."""
        truth = self.truth
        replicas = max(source.dp, target.dp)
        one_call = min(truth.prefill_call(target, n) for n in truth.prefill[target].lengths)
        pages = self.running / target.dp * -(-self.least_context // truth.page_size)
        calls = one_call * pages / truth.prefill_blocks
        even = self.running / replicas
        rounds = truth.migrate(source, target, even, self.running, self.least_context)
        return np.maximum(one_call, np.minimum(calls, rounds))

    def prefill(self, split: Split) -> float:
        """Returns the seconds to prefill each prompt once per replica with samples of it. With a
        queue, prompts are spread evenly over replicas, and share calls whenever they begin."""
        tokens = self.workload.prompts - 1
        prompt_id = self.workload.prompt_id
        replica = self._replica(_State(split, split))
        if prompt_id is not None:
            pairs = np.stack([0 * replica if self.has_queue else replica, prompt_id])
            first = np.unique(pairs, axis=1, return_index=True)[1]
            replica, tokens = replica[first], tokens[first]
        if self.has_queue:
            tokens = np.sort(tokens)[::-1]
            replica = np.arange(len(tokens)) % split.dp
        return self.truth.packed(split, replica, tokens)

    def _running(self, which: np.ndarray) -> np.ndarray:
        """Returns how many sequences of `which`, bool[sequences], run at each moment."""
        begun, ended = (
            np.searchsorted(np.sort(steps[which]), self.moments, side="right")
            for steps in (self.begin, self.end)
        )
        return begun - ended

    def _lengths(self) -> np.ndarray:
        """Returns the length bucket of the longest context until the next moment, int[moments]."""
        steps = np.array(self.machine.buckets.lengths)
        last_end = self._of_running(np.maximum, self.workload.prompts) + self.workload.cap
        needed = np.minimum(last_end - 1, self.context + self.machine.check_every)
        return steps[np.searchsorted(steps, needed)]

    def _recompute(self, split: Split) -> np.ndarray:
        """Returns the seconds to recompute all caches, as full rows of the longest context."""
        longest = np.maximum(self.context, 1)
        rows = self.running * self.mean_context / (longest * split.dp)
        pairs = zip(rows.tolist(), longest.tolist(), strict=True)
        return np.array([self.truth.recompute(split, count, length) for count, length in pairs])


def _seats(responses: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the decode step at which each sequence begins, and its row; int[sequences] each.
    Sequences begin in their order, each as soon as a row is free. No burst has to end for that, so
    no real path lets one begin earlier."""
    begin = np.zeros(len(responses), int)
    row = np.arange(len(responses))
    free = [(int(length), i) for i, length in enumerate(responses[:num_rows])]
    heapify(free)
    for i in range(num_rows, len(responses)):
        begin[i], row[i] = free[0]
        heapreplace(free, (int(begin[i] + responses[i]), int(row[i])))
    return begin, row
