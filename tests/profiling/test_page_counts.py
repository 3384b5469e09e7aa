"""Pages counted on a simulated clock, against the engine's own accounts of every single page."""

import numpy as np
import pytest
from devices_draw import draw_in_a_burst
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.accounts import Accounts
from pat_jax.engine.sequences.page_reserve import PageReserve
from pat_jax.engine.sequences.sequence_table import Request, SequenceTable
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.types import Split
from pat_jax.profiling.simulate.page_counts import PageCounts

PAGE, CHECK = 4, 3
SPLITS = (Split(4, 1), Split(2, 2), Split(1, 4))
KEY = np.zeros(2, np.uint32)


def memory(pages: int) -> MemoryModel:
    """Pages whose KV heads are split in f ways are f times as many."""
    return MemoryModel(
        limit=1e9,
        resident=0,
        weights=dict.fromkeys(SPLITS, 1),
        page={split: 4 // split.tp for split in SPLITS},
        pages={split: pages * split.tp for split in SPLITS},
        page_size=PAGE,
        chunk=1,
        staging=1,
        ahead=4,
    )


class Both:
    """The engine's accounts and the simulator's, treated alike."""

    def __init__(self, prompts: np.ndarray, most: int, pages: int):
        self.split, self.memory = SPLITS[0], memory(pages)
        words = iter(range(1, 10**6))  # prompts have nothing in common
        requests = [Request(tuple(next(words) for _ in range(n)), KEY, most) for n in prompts]
        rows = len(prompts)
        self.table = SequenceTable(requests, num_groups=self.split.dp, rows_per_group=rows)
        self.scheduler = Scheduler(
            self.table, num_pages=self.memory.pages[self.split], page_size=PAGE
        )
        self.accounts = Accounts(
            prompts, np.full(len(prompts), most), num_groups=self.split.dp, rows_per_group=rows
        )
        self.counts = PageCounts(self.accounts, self.memory, self.split)

    def same(self) -> None:
        np.testing.assert_array_equal(self.accounts.row, self.table.row)
        np.testing.assert_array_equal(self.accounts.is_done, self.table.is_done)
        np.testing.assert_array_equal(self.counts.held, self.scheduler._num_pages)
        assert self.counts.free.tolist() == [pool.num_free for pool in self.scheduler.pools]
        assert list(self.counts._queue) == list(self.scheduler._queue)
        assert (self.counts.free >= 0).all()

    def admit(self, rows: int, steps: int) -> None:
        if self.scheduler._queue:
            self.accounts.compact(rows)
            self.counts.admit(rows, steps, at_once=CHECK)
        self.scheduler.admit(rows, steps, at_once=CHECK)

    def draw(self, left: np.ndarray, steps: int) -> int:
        """The steps that the pages last."""
        reserve = PageReserve(self.scheduler.pools, len(self.accounts.length) * steps)
        reserve.fill(self.scheduler.lacking(steps))
        pages, run = draw_in_a_burst(
            self.scheduler, reserve.laid_out(), left, steps=steps, check_every=CHECK
        )
        reserve.note_drawn(self.scheduler.add(pages))
        reserve.take_back()
        # Steps in which nobody says anything are no matter of pages.
        last = -(-int(left.max(initial=0)) // CHECK) * CHECK
        assert min(self.counts.draw(left, steps, CHECK), last) == run
        return run

    def advance(self, emitted: np.ndarray, steps: int) -> None:
        """A burst of `steps` in which each sequence, int[sequences], would say so many tokens."""
        for accounts in (self.accounts, self.table):
            live = accounts.live
            left = accounts.end[live] - accounts.length[live]
            says = np.minimum(emitted[live], left)
            accounts.advance(np.minimum(says, steps), says > steps, steps)
        self.counts.release_ended()
        self.scheduler.release_ended()

    def switch(self, target: Split, below: int, steps: int) -> None:
        live = self.accounts.live
        is_recomputed = self.accounts.length[live] - 1 < below
        group = self.accounts.regroup(target.dp, is_recomputed)
        _, waits = self.counts.carry(target, group, is_recomputed, steps)
        self.accounts.leave(live[waits])
        rows = int(np.bincount(group[~waits], minlength=1).max())
        self.accounts.seat(group[~waits], num_groups=target.dp, rows_per_group=rows)
        self.scheduler.carry(
            target.dp, num_pages=self.memory.pages[target], is_recomputed=is_recomputed, steps=steps
        )
        self.split = target

    def balance(self, rng: np.random.Generator) -> None:
        """Some sequences of one group to one that sends none."""
        live, dp = self.accounts.live, self.split.dp
        if dp == 1 or not len(live):
            return
        group = self.accounts.group(live)
        source, target = rng.choice(dp, 2, replace=False)
        wanted = np.where((group == source) & (rng.random(len(live)) < 0.5), target, group)
        if (wanted == group).all():
            return
        self.scheduler.balance(wanted)
        is_at = self.counts.balance(wanted)
        rows = int(np.bincount(is_at).max())
        self.accounts.seat(is_at, num_groups=dp, rows_per_group=rows)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(4, 28),
    st.integers(8, 14),  # the longest sequence needs seven
    st.lists(st.sampled_from(["burst", "burst", "burst", "switch", "balance"]), max_size=20),
)
def test_it_does_what_the_engine_does(seed, size, pages, moves):
    rng = np.random.default_rng(seed)
    both = Both(rng.integers(1, 9, size), most=20, pages=pages)
    both.admit(size, steps=4)
    both.same()
    for move in moves:
        if move == "burst":
            steps = CHECK * int(rng.integers(1, 6))
            room = max(CHECK, steps // 2)
            gave_way = both.scheduler.grow(room, at_once=CHECK)
            assert both.counts.grow(room, at_once=CHECK) == gave_way
            both.admit(size, steps)
            both.same()
            live = both.accounts.live
            free = [pool.num_free for pool in both.scheduler.pools]
            suffice = bool((both.scheduler.lacking(steps) <= free).all())
            assert both.counts.suffice(steps) == suffice
            ends = rng.random(size) < 0.2
            said = np.where(ends, rng.integers(1, steps + 1), 100)
            left = both.accounts.end[live] - both.accounts.length[live]
            says = np.minimum(said[live], left)
            run = both.draw(says, steps)
            assert not suffice or run >= min(steps, says.max(initial=0))
            both.advance(said, run)
        elif move == "switch":
            target = SPLITS[int(rng.integers(0, 3))]
            if target != both.split:
                both.switch(target, below=int(rng.integers(0, 20)), steps=CHECK)
        else:
            both.balance(rng)
        both.same()


def test_a_pool_too_small_for_the_longest_sequence_is_refused():
    accounts = Accounts(np.array([5]), np.array([20]), num_groups=4, rows_per_group=1)
    with pytest.raises(ValueError, match="does not hold a sequence of 24 tokens"):
        PageCounts(accounts, memory(6), SPLITS[0])
