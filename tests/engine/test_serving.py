"""Rows and pages of sequences, held against devices that write and move tokens as they are told."""

import numpy as np
from bursts import burst, carry, crowded
from devices_draw import draw_in_a_burst
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pat_jax.engine.cache_manager import CacheManager
from pat_jax.engine.relocation.rounds import Shipment
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.page_reserve import PageReserve
from pat_jax.engine.sequences.prefill_calls import Copies, PageMoves, PrefillWork, prefill_calls
from pat_jax.engine.sequences.responses import Request, Responses
from pat_jax.engine.sequences.sequence_table import NO_SEQUENCE

BURST, ROOM, CHECK = 6, 4, 2
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

    def __init__(self, cache_manager: CacheManager):
        self.tables, self.table = cache_manager.tables, cache_manager.table
        assert isinstance(cache_manager.contents, Responses)
        self.responses = cache_manager.contents
        self.cache = self.empty()

    def empty(self) -> np.ndarray:
        pools = self.tables.pools
        return np.full((len(pools), pools[0].num_pages, self.tables.page_size), NO_TOKEN)

    def slots(self, sequence: int, replica: int, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        width, size = int(self.tables.count.max()), self.tables.page_size
        (pages,) = self.tables.rows(np.array([sequence]), width)
        where = pages[positions // size]
        assert (where != NULL_PAGE).all()
        return np.full(len(positions), replica), where, positions % size

    def write(self, sequence: int, replica: int, start: int, stop: int) -> None:
        positions = np.arange(start, stop)
        tokens = self.responses.tokens[sequence, start:stop]
        self.cache[self.slots(sequence, replica, positions)] = tokens

    def check(self, sequence: int, replica: int, stop: int) -> None:
        """Its first `stop` tokens are in the cache."""
        held = self.cache[self.slots(sequence, replica, np.arange(stop))]
        np.testing.assert_array_equal(held, self.responses.tokens[sequence, :stop])

    def prefill(self, round: PrefillWork) -> None:
        replicas, size = self.table.num_replicas, self.tables.page_size
        for call in prefill_calls(round.spans, num_replicas=replicas, sizes=(4, 2), page_size=size):
            blocks = [
                (int(call.sequence[g, b]), g, int(call.start[g, b]), int(call.length[g, b]))
                for g, b in np.argwhere(call.length).tolist()
            ]
            for sequence, replica, start, length in blocks:
                self.write(sequence, replica, start, start + length)
            for sequence, replica, start, length in blocks:  # all it attends to is there
                self.check(sequence, replica, start + length)
        self.copy(round.copies)

    def copy(self, copies: Copies) -> None:
        for replica, source, target in zip(*copies, strict=True):
            self.cache[replica, target] = self.cache[replica, source]

    def ship(self, shipments: list[Shipment], old: tuple[int, int], new: tuple[int, int]) -> None:
        """PrefillWork by round, in one memory: no page is packed where another one lies by then.

        Args:
          old, new: replicas and pages of a replica; the pools of a device are the same bytes.
        """
        before, self.cache = self.cache, self.empty()
        arrived: list[tuple[int, int]] = []
        waiting: list[list] = []
        for shipment in shipments:
            waiting.append([])
            for narrow, slot in np.argwhere(shipment.old_page != NULL_PAGE).tolist():
                page, place = (x[narrow, slot] for x in (shipment.old_page, shipment.new_page))
                source, target = (narrow % old[0], page), (narrow % new[0], place)
                assert not any(share_memory(source, other, old, new) for other in arrived)
                waiting[-1].append((source, target))
            for number in shipment.put:
                for source, target in waiting[number]:
                    assert target[1] != NULL_PAGE and target not in arrived
                    self.cache[target] = before[source]
                    arrived.append(target)
        assert len(arrived) == sum(map(len, waiting))

    def shift(self, moves: PageMoves) -> None:
        """In one memory, one page after the other."""
        assert len(set(zip(moves.new_replica, moves.new_page, strict=True))) == len(moves.new_page)
        for old_replica, old_page, new_replica, new_page in zip(*moves, strict=True):
            self.cache[new_replica, new_page] = self.cache[old_replica, old_page]


def share_memory(
    a: tuple[int, int], b: tuple[int, int], old: tuple[int, int], new: tuple[int, int]
) -> bool:
    """Whether page `a` of the old pools, (replica, page), and `b` of the new ones do, on any
    device."""
    fewer, before, after = min(old[0], new[0]), old[1], new[1]
    overlap = a[1] * after < (b[1] + 1) * before and b[1] * before < (a[1] + 1) * after
    return (a[0] - b[0]) % fewer == 0 and overlap


class Serving(RuleBasedStateMachine):
    @initialize(
        lengths=st.lists(
            st.tuples(st.integers(0, 4), st.integers(1, 12), st.integers(1, 9)),
            min_size=1,
            max_size=24,
        ),
        num_replicas=st.sampled_from(GROUPS),
        page_size=st.integers(1, 4),
        spare=st.integers(0, 30),
        rows=st.integers(1, 5),
    )
    def begin(self, lengths, num_replicas, page_size, spare, rows):
        requests = requests_of(lengths)
        self.rows, self.ended = rows, []
        self.num_pages = 1 + -(-max(a + b - 1 for _, a, b in lengths) // page_size) + spare
        self.responses = Responses.of(requests, num_replicas=num_replicas, rows_per_replica=rows)
        self.table = self.responses.table
        self.cache_manager = CacheManager(
            self.responses, num_pages=self.num_pages, page_size=page_size
        )
        self.tables = self.cache_manager.tables
        self.devices = Devices(self.cache_manager)

    has_work = precondition(lambda self: self.table.has_work)

    @has_work
    @rule(data=st.data())
    def step(self, data):
        table, cache_manager = self.table, self.cache_manager
        before = len(table.running)
        preempted = cache_manager.grow(ROOM, at_once=CHECK)
        assert len(table.running) == before - preempted
        self.devices.prefill(cache_manager.admit(self.rows, BURST, at_once=CHECK))
        running = table.running
        assert len(running), "somebody always gets on"
        for i, replica in zip(running.tolist(), table.replica(running).tolist(), strict=True):
            self.devices.check(i, replica, int(table.length[i]) - 1)
        left = table.end[running] - table.length[running]
        draw = np.array(data.draw(st.lists(st.integers(1, BURST), min_size=len(running))))[
            : len(running)
        ]
        goes_on = draw > 1
        says = np.minimum(np.where(goes_on, BURST, draw), left)
        steps = self.draw(says)
        emitted = np.minimum(says, steps)
        goes_on = (emitted < left) & (goes_on | (says > steps))
        first, replica = table.length[running] - 1, table.replica(running)
        burst(self.responses, emitted, goes_on, tokens=draw, steps=BURST)
        self.ended += running[~goes_on].tolist()
        for i, g, start, count in zip(
            running.tolist(), replica.tolist(), first, emitted, strict=True
        ):
            self.devices.write(i, g, int(start), int(start + count))
        cache_manager.release_ended()

    def draw(self, says: np.ndarray) -> int:
        """Rows draw pages as they grow; returns the steps that the reserve lasts, some at least."""
        tables = self.tables
        reserve = PageReserve(tables.pools, self.table.rows_per_replica * BURST)
        reserve.fill(tables.lacking(BURST))
        pages, steps = draw_in_a_burst(
            self.cache_manager, reserve.laid_out(), says, steps=BURST, check_every=CHECK
        )
        assert steps >= min(ROOM, -(-int(says.max()) // CHECK) * CHECK)
        reserve.note_drawn(tables.add(pages))
        reserve.take_back()
        return steps

    @has_work
    @rule(
        data=st.data(),
        num_replicas=st.sampled_from(GROUPS),
        fewer=st.integers(0, 8),
        waits=st.lists(st.integers(0, 10**6), max_size=3),
    )
    def switch(self, data, num_replicas, fewer, waits):
        table = self.table
        running = table.running
        if not len(running):
            return
        flags = st.lists(st.booleans(), min_size=len(running), max_size=len(running))
        smallest = 1 + -(-int(table.end.max() - 1) // self.tables.page_size)
        before = len(self.tables.pools), self.num_pages
        self.num_pages = max(smallest, self.num_pages - fewer)
        is_recomputed = np.array(data.draw(flags))
        with crowded(waits):
            shipments, round = carry(
                self.cache_manager,
                num_replicas,
                num_pages=self.num_pages,
                is_recomputed=is_recomputed,
                steps=CHECK,
            )
        self.rows = max(self.rows, table.rows_per_replica)
        self.devices.ship(shipments, before, (num_replicas, self.num_pages))
        self.devices.prefill(round)
        for i, replica in zip(table.running.tolist(), table.replica(table.running), strict=True):
            self.devices.check(i, int(replica), int(table.length[i]) - 1)

    @has_work
    @rule(data=st.data(), giving=st.lists(st.booleans(), min_size=4, max_size=4))
    def balance(self, data, giving):
        """Any sequences of some replicas go to any of the others; those whose pages do not fit
        stay."""
        table, cache_manager = self.table, self.cache_manager
        running, old = table.running, table.replica(table.running)
        wish = self.wish(data, giving)
        getting = [g for g in range(table.num_replicas) if not giving[g]]
        if not (len(running) and getting):
            return
        held = self.tables.count[running].tolist()
        free = [pool.num_free for pool in self.tables.pools]
        turn = cache_manager.admissions.turn.copy()
        replica, moves = cache_manager.balance(wish)
        cache_manager.arrive(replica, np.zeros(len(running), bool), CHECK)
        self.rows = max(self.rows, table.rows_per_replica)
        new = table.replica(table.running)
        assert (
            table.running.tolist() == running.tolist()
            and (turn == cache_manager.admissions.turn).all()
        )
        for g in getting:
            lacked = [n for n, a, b in zip(held, wish, new, strict=True) if a == g != b]
            assert not lacked or sum(n for n, b in zip(held, wish, strict=True) if b == g) > free[g]
        assert ((new == wish) | (new == old)).all() and (new == replica).all()
        assert self.tables.count[running].tolist() == held
        is_moved = new != old
        filled = [-(-(table.length[i] - 1) // self.tables.page_size) for i in running[is_moved]]
        assert len(moves.old_page) <= sum(filled)
        self.devices.shift(moves)
        for i, g in zip(running.tolist(), new.tolist(), strict=True):
            self.devices.check(i, g, int(table.length[i]) - 1)

    def wish(self, data, giving: list[bool]) -> np.ndarray:
        """Where each running sequence is to be: one of some replicas in any of the others, or where
        it is."""
        old = self.table.replica(self.table.running)
        getting = [g for g in range(self.table.num_replicas) if not giving[g]]
        wish = st.sampled_from([None, *getting])
        wishes = [data.draw(wish) if giving[g] else None for g in old.tolist()]
        pairs = zip(old.tolist(), wishes, strict=True)
        return np.array([g if w is None else w for g, w in pairs], np.int64)

    @precondition(lambda self: not self.table.has_work)
    @rule()
    def rest(self):
        assert self.tables.num_held == 0 and self.tables.count.max() == 0

    @invariant()
    def each_sequence_is_in_one_place(self):
        if not hasattr(self, "cache_manager"):
            return
        table, tables = self.table, self.tables
        running, waiting = table.running.tolist(), list(self.cache_manager._queue)
        assert sorted([*running, *waiting, *self.ended]) == list(range(len(table)))
        assert sorted(waiting) == table.waiting.tolist()
        assert table.load().waiting == len(waiting)
        width = int(tables.count[running].max(initial=0))
        assert tables.count.max() == width, "nobody else has any"
        held = {
            (replica, page)
            for i, replica in zip(running, table.replica(table.running).tolist(), strict=True)
            for page in tables.rows(np.array([i]), width)[0].tolist()
            if page != NULL_PAGE
        }
        assert tables.num_held == len(held)
        row_to_sequence = table.row_to_sequence
        assert sorted(row_to_sequence[row_to_sequence != NO_SEQUENCE].tolist()) == running

    @invariant()
    def nothing_contradicts_itself(self):
        if hasattr(self, "cache_manager"):
            self.cache_manager.check_integrity()


TestServing = Serving.TestCase
