"""Rows and pages of sequences, held against devices that write and move tokens as they are told."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pat_jax.engine.accounts import NO_SEQUENCE
from pat_jax.engine.admission import Admission, PageMoves, Round
from pat_jax.engine.paging import NULL_PAGE, prefill_calls
from pat_jax.engine.scheduler import Request, Scheduler
from pat_jax.engine.state import BurstOutput

BURST = 4
NO_TOKEN = -7
GROUPS = (1, 2, 4)
SYSTEM = (1, 2, 1)


def requests_of(lengths: list[tuple[int, int, int]]) -> list[Request]:
    """(which prompt, its tokens, most new tokens) each; many prompts begin alike."""
    rng = np.random.default_rng(0)
    tails = [tuple(rng.integers(1, 3, 20).tolist()) for _ in range(5)]
    return [
        Request((*SYSTEM, *tails[which])[:length], np.zeros(2, np.uint32), most)
        for which, length, most in lengths
    ]


class Devices:
    """Writes known tokens where a table says, as a model does with what it computes of them."""

    def __init__(self, admission: Admission):
        self.admission, self.scheduler = admission, admission.scheduler
        self.cache = self.empty()

    def empty(self) -> np.ndarray:
        pools = self.admission.pools
        return np.full((len(pools), pools[0].num_pages, self.admission.page_size), NO_TOKEN)

    def slots(self, sequence: int, group: int, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        width, size = self.admission.most_pages, self.admission.page_size
        (pages,) = self.admission.table(np.array([sequence]), width)
        where = pages[positions // size]
        assert (where != NULL_PAGE).all()
        return np.full(len(positions), group), where, positions % size

    def write(self, sequence: int, group: int, start: int, stop: int) -> None:
        positions = np.arange(start, stop)
        tokens = self.scheduler.tokens[sequence, start:stop]
        self.cache[self.slots(sequence, group, positions)] = tokens

    def check(self, sequence: int, group: int, stop: int) -> None:
        """Its first `stop` tokens are in the cache."""
        held = self.cache[self.slots(sequence, group, np.arange(stop))]
        np.testing.assert_array_equal(held, self.scheduler.tokens[sequence, :stop])

    def prefill(self, round: Round) -> None:
        groups, size = self.scheduler.num_groups, self.admission.page_size
        for call in prefill_calls(round.spans, num_groups=groups, blocks=2, page_size=size):
            blocks = [(g, b) for g, b in np.argwhere(call.length).tolist()]
            for act in (self.write, self.check):  # all are written before any attends
                for at in blocks:
                    stop = int(call.start[at] + call.length[at])
                    first = (int(call.start[at]),) if act == self.write else ()
                    act(int(call.sequence[at]), at[0], *first, stop)
        for group, source, target in zip(*round.copies, strict=True):
            self.cache[group, target] = self.cache[group, source]

    def move(self, moves: PageMoves) -> None:
        old, self.cache = self.cache, self.empty()
        assert len(set(zip(moves.new_group, moves.new_page, strict=True))) == len(moves.new_page)
        self.cache[moves.new_group, moves.new_page] = old[moves.old_group, moves.old_page]


def burst(scheduler: Scheduler, emitted: np.ndarray, goes_on: np.ndarray, token: int = 1) -> None:
    """int[live], bool[live]."""
    rows, live = scheduler.num_groups * scheduler.rows_per_group, scheduler.row[scheduler.live]
    said, is_live = np.zeros(rows, np.int32), np.zeros(rows, bool)
    said[live], is_live[live] = emitted, goes_on
    tokens = np.full((rows, BURST), token, np.int32)
    output = BurstOutput(tokens, -tokens.astype(np.float32), said, np.int32(BURST))
    scheduler.retire(output, is_live)


class Serving(RuleBasedStateMachine):
    @initialize(
        lengths=st.lists(
            st.tuples(st.integers(0, 4), st.integers(1, 12), st.integers(1, 9)),
            min_size=1,
            max_size=24,
        ),
        num_groups=st.sampled_from(GROUPS),
        page_size=st.integers(1, 4),
        spare=st.integers(0, 30),
        rows=st.integers(1, 5),
    )
    def begin(self, lengths, num_groups, page_size, spare, rows):
        requests = requests_of(lengths)
        self.rows, self.ended = rows, []
        self.num_pages = 1 + -(-max(a + b - 1 for _, a, b in lengths) // page_size) + spare
        self.scheduler = Scheduler(requests, num_groups=num_groups, rows_per_group=rows)
        self.admission = Admission(self.scheduler, num_pages=self.num_pages, page_size=page_size)
        self.devices = Devices(self.admission)

    has_work = precondition(lambda self: self.scheduler.has_work)

    @has_work
    @rule(data=st.data())
    def step(self, data):
        scheduler, admission = self.scheduler, self.admission
        before = len(scheduler.live)
        preempted = admission.grow(BURST)
        assert len(scheduler.live) == before - preempted
        self.devices.prefill(admission.admit(self.rows, BURST))
        live = scheduler.live
        assert len(live), "somebody always gets on"
        for i, group in zip(live.tolist(), scheduler.group(live).tolist(), strict=True):
            self.devices.check(i, group, int(scheduler.length[i]) - 1)
        left = scheduler.end[live] - scheduler.length[live]
        draw = np.array(data.draw(st.lists(st.integers(1, BURST), min_size=len(live))))[: len(live)]
        emitted = np.minimum(draw, left)
        goes_on = (emitted < left) & (draw > 1)
        first, group = scheduler.length[live] - 1, scheduler.group(live)
        burst(scheduler, emitted, goes_on, token=int(draw[0]))
        self.ended += live[~goes_on].tolist()
        for i, g, start, count in zip(live.tolist(), group.tolist(), first, emitted, strict=True):
            self.devices.write(i, g, int(start), int(start + count))
        admission.release_ended()

    @has_work
    @rule(data=st.data(), num_groups=st.sampled_from(GROUPS), fewer=st.integers(0, 8))
    def switch(self, data, num_groups, fewer):
        scheduler = self.scheduler
        live = scheduler.live
        if not len(live):
            return
        flags = st.lists(st.booleans(), min_size=len(live), max_size=len(live))
        smallest = 1 + -(-int(scheduler.end.max() - 1) // self.admission.page_size)
        moves, round = self.admission.carry(
            num_groups,
            num_pages=max(smallest, self.num_pages - fewer),
            is_recomputed=np.array(data.draw(flags)),
            steps=BURST,
        )
        self.rows = max(self.rows, scheduler.rows_per_group)
        self.devices.move(moves)
        self.devices.prefill(round)
        for i, group in zip(scheduler.live.tolist(), scheduler.group(scheduler.live), strict=True):
            self.devices.check(i, int(group), int(scheduler.length[i]) - 1)

    @precondition(lambda self: not self.scheduler.has_work)
    @rule()
    def rest(self):
        assert self.admission.pages_held == 0 and self.admission.most_pages == 0

    @invariant()
    def each_sequence_is_in_one_place(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler, admission = self.scheduler, self.admission
        live, waiting = scheduler.live.tolist(), list(admission._queue)
        assert sorted([*live, *waiting, *self.ended]) == list(range(len(scheduler.requests)))
        assert sorted(waiting) == scheduler.waiting.tolist()
        assert scheduler.load().waiting == len(waiting)
        held = {
            (group, page)
            for i, group in zip(live, scheduler.group(scheduler.live).tolist(), strict=True)
            for page in admission.table(np.array([i]), admission.most_pages)[0].tolist()
            if page != NULL_PAGE
        }
        assert admission.pages_held == len(held)
        occupants = scheduler.occupants
        assert sorted(occupants[occupants != NO_SEQUENCE].tolist()) == live


TestServing = Serving.TestCase


def make_admission(requests: list[Request], *, num_groups=1, num_pages=1000, **options):
    scheduler = Scheduler(requests, num_groups=num_groups, rows_per_group=1)
    return Admission(scheduler, num_pages=num_pages, page_size=4, **options)


def plain(count: int, prompt: int = 5, most: int = 9) -> list[Request]:
    """Prompts that have nothing in common."""
    rng = np.random.default_rng(1)
    return [
        Request(tuple(rng.integers(0, 10**6, prompt).tolist()), np.zeros(2, np.uint32), most)
        for _ in range(count)
    ]


def test_the_longest_expected_are_admitted_first():
    admission = make_admission(plain(6), expected=np.array([5, 9, 7, 9, 1, 8.0]))
    admission.admit(4, BURST)
    assert admission.scheduler.live.tolist() == [1, 2, 3, 5]
    in_order = make_admission(plain(6))
    in_order.admit(4, BURST)
    assert in_order.scheduler.live.tolist() == [0, 1, 2, 3]


def test_samples_of_a_prompt_go_to_one_group_and_are_prefilled_once():
    requests = [request for request in plain(4, prompt=11) for _ in range(3)]
    admission = make_admission(requests, num_groups=2)
    round = admission.admit(6, BURST)
    group = admission.scheduler.group(np.arange(12)).reshape(4, 3)
    assert (group == group[:, :1]).all() and sorted(group[:, 0]) == [0, 0, 1, 1]
    assert round.spans.sequence.tolist() == [0, 3, 6, 9]
    assert (round.spans.stop - round.spans.start).tolist() == [10] * 4
    assert len(round.copies.group) == 8


def test_rows_are_not_left_empty_for_the_sake_of_a_prefix():
    admission = make_admission([request for request in plain(1) for _ in range(6)], num_groups=2)
    admission.admit(4, BURST)
    assert np.bincount(admission.scheduler.group(np.arange(6))).tolist() == [3, 3]


def test_the_youngest_gives_way_and_comes_back_first():
    """Three sequences of 2 pages; the pool has 7, and each will need 4."""
    admission = make_admission(plain(4, most=12), num_pages=8)
    scheduler = admission.scheduler
    admission.admit(3, steps=3)
    assert scheduler.live.tolist() == [0, 1, 2] and admission.pages_held == 6
    burst(scheduler, np.full(3, 3), np.ones(3, bool))
    assert admission.grow(4) == 1  # two more pages than there are
    assert scheduler.live.tolist() == [0, 1]
    assert scheduler.length[2] == 5 + 3  # what it said is kept
    assert len(admission.admit(3, 4).spans.sequence) == 0, "not back at once into a full pool"
    burst(scheduler, np.array([4, 4]), np.array([True, False]))
    admission.release_ended()
    assert admission.grow(4) == 0
    round = admission.admit(3, 1)
    assert round.spans.sequence.tolist() == [2]  # 3 waits behind it
    assert round.spans.stop.tolist() == [7]


def test_nobody_overtakes_who_needs_more_pages():
    three = zip(plain(3, prompt=17), (9, 17, 2), strict=True)
    requests = [replace(request, tokens=request.tokens[:n]) for request, n in three]
    admission = make_admission(requests, num_pages=8)
    admission.admit(3, BURST)
    assert admission.scheduler.live.tolist() == [0]


def test_pages_that_are_shared_move_once():
    requests = [*plain(1, prompt=13)] * 3
    admission = make_admission(requests, num_groups=1, num_pages=100)
    admission.admit(3, BURST)
    moves, round = admission.carry(
        1, num_pages=50, is_recomputed=np.array([False, False, True]), steps=BURST
    )
    # 12 known tokens: three pages, all shared; the third sequence finds them.
    assert len(moves.old_page) == 3 and len(round.spans.sequence) == 0
    assert (admission.table(np.arange(3), 3) == moves.new_page).all()
    assert admission.pages_held == 3 + 1  # and room for its next burst


def test_groups_that_merge_share_what_they_have_in_common():
    system = tuple(range(100, 108))
    requests = [Request((*system, i), np.zeros(2, np.uint32), 5) for i in range(2)]
    admission = make_admission(requests, num_groups=2, num_pages=100)
    admission.admit(1, BURST)
    assert admission.pages_held == 2 * 3
    moves, _ = admission.carry(1, num_pages=100, is_recomputed=np.zeros(2, bool), steps=BURST)
    assert len(moves.old_page) == 2 and len(set(moves.old_group)) == 1


def test_a_sequence_that_no_pool_holds_is_refused():
    with pytest.raises(ValueError, match="does not hold a sequence of 13 tokens"):
        make_admission(plain(1, prompt=5, most=9), num_pages=4)
    make_admission(plain(1, prompt=5, most=8), num_pages=4)


def test_ten_thousand_through_a_pool_that_holds_a_hundred():
    """Each ends once, with its own tokens; few pages are held beyond what is filled."""
    rng = np.random.default_rng(0)
    response = np.clip(rng.lognormal(4, 1, 10_000).astype(int), 1, 400)
    prompts = [tuple(rng.integers(0, 10**6, n).tolist()) for n in rng.integers(10, 60, 2500)]
    requests = [Request(prompts[i // 4], np.zeros(2, np.uint32), 400) for i in range(10_000)]
    scheduler = Scheduler(requests, num_groups=2, rows_per_group=1)
    total = sum(len(request.tokens) for request in requests) + int(response.sum())
    num_pages = 1 + total // 100 // 16 // 2
    admission = Admission(scheduler, num_pages=num_pages, page_size=16)
    times_ended = np.zeros(10_000, int)
    num_preempted, prefilled, held, filled = 0, 0, 0, 0
    while scheduler.has_work:
        num_preempted += admission.grow(16)
        round = admission.admit(64, 16)
        prefilled += int((round.spans.stop - round.spans.start).sum())
        live = scheduler.live
        assert len(live) and (np.bincount(scheduler.group(live)) <= 64).all()
        ahead = np.minimum(scheduler.length[live] - 1 + 16, scheduler.end[live] - 1)
        np.testing.assert_array_equal(admission._num_pages[live], -(-ahead // 16))
        held += admission._num_pages[live].sum() * 16
        filled += (scheduler.length[live] - 1).sum()
        left = response[live] - (scheduler.length[live] - scheduler.prompt_length[live])
        rows = 2 * scheduler.rows_per_group
        output = BurstOutput(
            np.repeat(scheduler.occupants[:, None], 16, axis=1).astype(np.int32),
            np.zeros((rows, 16), np.float32),
            np.zeros(rows, np.int32),
            np.int32(16),
        )
        output.emitted[scheduler.row[live]] = np.minimum(left, 16)
        goes_on = np.zeros(rows, bool)
        goes_on[scheduler.row[live]] = left > 16
        scheduler.retire(output, goes_on)
        times_ended[live[scheduler.is_done[live]]] += 1
        admission.release_ended()
        assert sum(pool.num_free for pool in admission.pools) <= 2 * (num_pages - 1)
    assert (times_ended == 1).all() and admission.pages_held == 0
    for i, done in enumerate(scheduler.completions(eos_ids=())):
        assert len(done.tokens) == response[i] and (done.tokens == i).all()
    assert num_preempted > 0
    # What was given up is computed again; the four samples of a prompt share it mostly.
    assert prefilled < 0.6 * sum(len(request.tokens) for request in requests)
    assert (held - filled) / held < 0.2
