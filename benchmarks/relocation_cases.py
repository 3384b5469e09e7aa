"""Pages that live sequences hold in the middle of a rollout, on their way to another layout.

No device computes anything: who holds which page is decided by the engine's own scheduler, for responses
of known lengths.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.workloads import read
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.relocation.order import Pools
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.page_allocator import (
    NO_PAGES,
    NULL_PAGE,
    PageAllocator,
)
from pat_jax.engine.sequences.prefill_calls import PageMoves
from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.profiling.simulate.response_lengths import BUILT_IN, Draw, ResponseLengths

SAMPLES, DEVICES = 8, 8
CONFIG = RolloutConfig()
PAGE, CHECK, BURST = CONFIG.page_size, CONFIG.check_every, CONFIG.burst_steps
SPLITS = tuple(Split(DEVICES // tp, tp) for tp in (1, 2, 4, 8))
ENDED = (0.25, 0.5, 0.8, 0.95)  # share of the responses
FILLS = (None, 0.6, 0.8, 0.95, 1.0)  # of the pools; None: as it is
KV_HEADS = (8, 2)


def workloads(data: Path | None, size: int, seed: int) -> dict[str, Workload]:
    """Rollouts of `size` responses, eight to a prompt."""
    if data is None:
        draw = Draw(size, cap=16_384, samples_per_prompt=SAMPLES, seed=seed)
        return {name: ResponseLengths.built_in(name).draw(draw) for name in BUILT_IN}
    found, prompt = {}, np.arange(size) // SAMPLES
    for name, lengths in read(data).items():
        drawn = lengths.sample(size, seed)
        prompts = drawn.prompts[prompt * SAMPLES]
        found[name] = replace(drawn, prompts=prompts, prompt_id=prompt + seed * size)
    return found


def pools_of(split: Split, pages: int, kv_heads: int) -> Pools:
    """In the memory of `pages` of TP 1."""
    return Pools(split.dp, pages * min(split.tp, kv_heads))


def moments(workload: Workload, pools: Pools) -> Iterator[tuple[float, Scheduler]]:
    """The scheduler of a static rollout when each share of `ENDED` has been reached."""
    table = SequenceTable(
        workload.prompts,
        np.full(workload.size, workload.cap),
        prompt_id=workload.prompt_id,
        num_groups=pools.groups,
        rows_per_group=1,
    )
    scheduler = Scheduler(Contents(table), num_pages=pools.pages, page_size=PAGE)
    ended = list(ENDED)
    while ended:
        # As rows draw them on the devices, pages are taken a few tokens at a time.
        scheduler.grow(BURST // 2, at_once=CHECK)
        if table.num_steps % BURST == 0:
            scheduler.admit(workload.size // pools.groups, BURST, at_once=CHECK)
        live = table.live
        left = workload.responses[live] - (table.length - table.prompt_length)[live]
        table.advance(np.minimum(left, CHECK), left > CHECK, CHECK)
        scheduler.release_ended()
        while ended and table.is_done.mean() >= ended[0]:
            share = ended.pop(0)
            if table.has_work:
                yield share, scheduler


@dataclass(frozen=True)
class Held:
    """What live sequences hold when a switch is due."""

    group: np.ndarray  # int[live]
    tokens: np.ndarray  # int[live]
    pages: list[np.ndarray]  # of each sequence, int[pages]

    @classmethod
    def by(cls, scheduler: Scheduler, fill: float | None) -> "Held":
        table = scheduler.table
        live = table.live
        tokens, tables = table.length[live] - 1, scheduler.tables
        filled = -(-tokens // PAGE)
        pages = [tables.of(i)[:n] for i, n in zip(live.tolist(), filled.tolist(), strict=True)]
        held = cls(table.group(live), tokens, pages)
        return held if fill is None else held.filled(fill, copy.deepcopy(tables.pools))

    def filled(self, fill: float, allocators: list[PageAllocator]) -> "Held":
        """The same with `fill` of the pages held, as far as there are sequences to hold them.

        The last sequences are left out where more are held, whatever group they are in. Else those of
        each group grow in turn. The allocators are used up.
        """
        keep, groups = list(range(len(self.tokens))), range(len(allocators))
        goal = int(fill * allocators[0].capacity)
        is_over = sum(len(self._union(keep, g)) for g in groups) > goal * len(groups)
        while is_over and sum(len(self._union(keep, g)) for g in groups) > goal * len(groups):
            keep.pop()
        tokens, pages = self.tokens.copy(), list(self.pages)
        for group, pool in enumerate([] if is_over else allocators):
            mine, held = np.flatnonzero(self.group == group).tolist(), self._union(keep, group)
            # First in the allocator's order; pages that are given but not filled yet come last.
            given = pool.take(pool.num_free)
            assert given is not None, "counted"
            order = np.concatenate([given, np.arange(NULL_PAGE + 1, pool.num_pages)])
            order = order[np.sort(np.unique(order, return_index=True)[1])]
            more = order[~np.isin(order, held)][: max(0, goal - len(held))]
            for turn, k in enumerate(mine):
                pages[k] = np.concatenate([pages[k], more[turn :: len(mine)]])
                tokens[k] += PAGE * len(more[turn :: len(mine)])
        return Held(self.group[keep], tokens[keep], [pages[k] for k in keep])

    def _union(self, sequences: list[int], group: int) -> np.ndarray:
        mine = [self.pages[k] for k in sequences if self.group[k] == group]
        return np.unique(np.concatenate([NO_PAGES, *mine]))


class Switch:
    """All that is held goes to other pools, as far as they hold it."""

    def __init__(self, held: Held, old: Pools, new: Pools):
        self.held, self.old, self.new = held, old, new
        table = SequenceTable(
            held.tokens, np.ones(len(held.tokens)), num_groups=old.groups, rows_per_group=10**6
        )
        every = np.arange(len(held.tokens))
        table.enter(every, held.group)
        self.group = table.regroup(new.groups, np.zeros(len(every), bool))
        moved, room = set(), np.full(new.groups, new.pages - 1)
        self.goes = []  # sequences that find pages there, as in `Scheduler.carry`
        for k in every.tolist():
            fresh = self._moves(k) - moved
            if len(fresh) <= room[self.group[k]]:
                room[self.group[k]] -= len(fresh)
                moved |= fresh
                self.goes.append(k)

    def leaves(self, k: int) -> set[tuple[int, int]]:
        """The old group and page of all that sequence k has."""
        return {(int(self.held.group[k]), page) for page in self.held.pages[k].tolist()}

    def _moves(self, k: int) -> set[tuple[int, int, int, int]]:
        return {(*page, int(self.group[k]), NULL_PAGE) for page in self.leaves(k)}

    def moves(self, left: set[int]) -> PageMoves:
        """Those of all that goes but `left`, which is recomputed."""
        of = [self._moves(k) for k in self.goes if k not in left]
        return PageMoves(*np.array(sorted(set().union(*of)), np.int64).reshape(-1, 4).T)
