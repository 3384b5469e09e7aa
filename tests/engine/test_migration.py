"""Migrations of pages against a pool built in NumPy and put onto the target's shards."""

from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_shards
from exchanges import Geometry, drawn
from fakes import SETTINGS, SPLITS, subject
from hypothesis import given, settings
from hypothesis import strategies as st
from page_pools import CASES, PAGE_SIZE, Programs, assert_pages_arrived, chain, put

from pat_jax.engine.device.pages.migration import Migration
from pat_jax.engine.device.pages.pages import Exchange, put_at_once, put_in_turn, view
from pat_jax.engine.device_executor import DeviceExecutor, DevicePool
from pat_jax.engine.relocation import order
from pat_jax.engine.relocation.order import Placed, placed
from pat_jax.engine.relocation.rounds import ALL, MOST_EMPTY, Shipment, rounds
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import PageMoves
from pat_jax.models.cache.paged_layer import KV_AXES
from tests.lossless import CARRIES, make_requests


# Heads that are all split, split and copied, and both over factors of 2 and 3.
@pytest.mark.parametrize(
    "case",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in CASES[:2]), *CASES[5:]],
    ids=str,
)
def test_every_page_arrives_and_no_other_is_lost_on_the_way(case):
    """For every pair of layouts in one memory, full to its last page or not."""
    rng = np.random.default_rng(case)
    for source, target in permutations(chain(*case).values(), 2):
        exchange = Exchange.between(source, target)
        ways, (narrow, wide) = exchange.num_heads, (exchange.narrow, exchange.wide)
        copies = wide.size(exchange.copies)
        pages = 7 * narrow.size(narrow.kv_axes)  # as many bytes in both
        geometry = Geometry(wide.split.dp, ways, copies, pages, exchange.is_up)
        assert geometry.narrow.replicas == narrow.split.dp
        migration = Migration(Programs(source, target), source, target)  # type: ignore[arg-type]
        seen = jax.jit(view(source, target), donate_argnums=0)
        for skew, fill in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.4)):
            moves = drawn(geometry, rng, fill, skew)
            old, new = geometry.pools
            arrivals = placed(moves, [*np.arange(len(moves.old_page))[:, None]], old, new)
            assert (arrivals.new_page != NULL_PAGE).all()
            shape = (case[1], PAGE_SIZE, 2)
            x = rng.normal(size=(old.pages * old.replicas, *shape)).astype(np.float32)
            expected = np.zeros((new.pages * new.replicas, *shape), np.float32)
            at = moves.new_replica * new.pages + arrivals.new_page
            expected[at] = x[moves.old_replica * old.pages + moves.old_page]
            arrived, sent = migration.run(seen(put(x, source)), arrivals.shipments)
            assert_pages_arrived(arrived, at, expected, target)
            assert sent.least <= sent.total <= 1.05 * sent.least


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_way_to_move_a_page_sends_less(case):
    """Copies sent of a wide device's part of a page against who holds what, counted one by one."""
    heads = case[1]
    for source, target in permutations(chain(*case).values(), 2):
        exchange = Exchange.between(source, target)
        rows = exchange.narrow.split.dp
        place = {}  # of row g, the g-th narrow replica's only one
        for wide, replicas in enumerate(exchange.members.tolist()):
            place |= {g: wide * len(replicas) + i for i, g in enumerate(replicas)}
        held: dict = {}
        for layout in (source, target):
            sharding = layout.sharding(*KV_AXES)
            for device, (at, of, *_) in sharding.devices_indices_map((rows, heads, 1, 1)).items():
                seats = range(rows)[at]
                mine = [
                    g for g in range(rows) if (place[g] if layout is exchange.wide else g) in seats
                ]
                cells = {(g, head) for g in mine for head in range(heads)[of]}
                held.setdefault(device, []).append(cells)
        lacking = sum(len(after - before) for before, after in held.values())
        part = heads // exchange.wide.size(exchange.wide.kv_axes)
        assert lacking == exchange.copies_sent * part * rows


def bytes_a_device(arrays) -> int:
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in arrays)


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        pytest.param("kv8", ((1, 8), (8, 1)), marks=pytest.mark.slow),
        ("kv2", ((1, 2), (8, 2))),
        pytest.param("kv1", ((1, 8), (8, 1)), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("carry", CARRIES)
def test_a_switch_sends_and_holds_what_it_says(name, paths, carry, monkeypatch):
    """Live arrays of a device, looked at whenever a program of the switch has run."""
    table, peaks, before = type(subject(name).engine.programs), [], []
    lookup, relocate = table.__getitem__, DeviceExecutor.relocate

    def watched(self, key):
        def run(*args):
            out = jax.block_until_ready(lookup(self, key)(*args))
            peaks.append(bytes_a_device(jax.live_arrays()))
            return out

        return run

    def begin(self, relocation):
        before.append(bytes_a_device(jax.live_arrays()))
        monkeypatch.setattr(table, "__getitem__", watched)
        return relocate(self, relocation)

    def settle(self):
        monkeypatch.setattr(table, "__getitem__", lookup)

    monkeypatch.setattr(DeviceExecutor, "relocate", begin)
    monkeypatch.setattr(DevicePool, "settle", settle)
    requests = make_requests(SETTINGS[name], 0)
    for path in paths:
        planner = subject(name).adaptive(path, carry, len(requests))
        peaks.clear()
        before.clear()
        (switch,) = subject(name).run(requests, planner)[1].switches
        assert switch.sent is not None and switch.sent.total <= 1.05 * switch.sent.least
        assert (switch.sent.least > 0) == (carry != "recompute" or path[0] > path[1])
        # Weights that are more afterwards stay; the pool is as large as it was.
        specs = subject(name).engine.specs
        sizes = {
            str(layout): bytes_a_device(jax.tree.leaves(specs.params(layout)))
            for layout in specs.layouts.values()
        }
        grown = max(0, sizes[switch.target] - sizes[switch.source])
        # Numbers of the rows come on top, and on this backend the pages' indices.
        assert max(peaks) <= before[0] + grown + switch.sent.extra + 2**14


COUNTS = st.lists(st.integers(0, 200), min_size=2, max_size=8).map(np.array)


@given(st.permutations(range(1, 7)).map(lambda pages: [*pages[:3], NULL_PAGE, NULL_PAGE]))
def test_pages_are_put_alike_on_every_back_end(pages):
    rng = np.random.default_rng(pages)
    pool, new = (jnp.asarray(rng.normal(size=(n, 2, 3, 2)).astype(np.float32)) for n in (7, 5))
    expected = np.array(pool)
    expected[pages[:3]] = new[:3]
    for write in (put_in_turn, put_at_once):
        np.testing.assert_array_equal(write(pool, new, jnp.array(pages)), expected)


@given(COUNTS)
def test_rounds_move_everything_and_hardly_more(pages):
    plan = rounds(pages)
    room = np.zeros(len(pages), int)
    for step in plan:
        room[slice(None) if step.replica == ALL else step.replica] += step.size
    assert (room >= pages).all()
    assert sum(step.slots(len(pages)) for step in plan) <= (1 + MOST_EMPTY) * pages.sum()


@pytest.mark.parametrize("which", [("kv8",), ("kv2",), ("kv1",), ("kv2", "int8")], ids=" ".join)
def test_resharding_equals_device_put_and_sends_what_the_devices_lack(which):
    """Every pair of layouts, there and back, chunk by chunk; the old leaves are gone. Going up nothing
    is sent; going down, what the new shards hold and the old ones do not."""
    one = subject(*which)
    engine = one.engine
    for source, target in permutations(engine.layouts.values(), 2):
        engine.set_weights(one.weights(source), source)
        old, before = jax.tree.leaves(engine.params), bytes_held(engine.params)
        sent, _ = engine.weights.reshard(target)
        is_up, after = target.split.tp > source.split.tp, bytes_held(engine.params)
        assert sent == (0 if is_up else after - before)
        assert engine.layout is target
        assert_same_shards(engine.params, one.weights(target))
        kept = {id(leaf) for leaf in jax.tree.leaves(engine.params)}
        assert all(leaf.is_deleted() for leaf in old if id(leaf) not in kept)
        engine.weights.reshard(source)
        assert_same_shards(engine.params, one.weights(source))
        engine.release_weights()


@pytest.mark.parametrize("name", ["kv8", "kv2", "kv1"])
def test_lowering_tp_on_cpu_copies_each_weight_once(name):
    """To one replica's memory, which the others share: XLA takes over what lies aligned there."""
    engine = subject(name).engine
    source, target = engine.layouts[SPLITS[3]], engine.layouts[SPLITS[0]]
    engine.set_weights(subject(name).weights(source), source)
    old = jax.tree.leaves(engine.params)
    engine.weights.reshard(target)
    for before, after in zip(old, jax.tree.leaves(engine.params), strict=True):
        if after is not before:
            shards = after.addressable_shards
            assert len(shards) == target.mesh.size
            assert len({shard.data.unsafe_buffer_pointer() for shard in shards}) == 1
    engine.release_weights()


def bytes_held(params) -> int:
    """On all devices together, copies included."""
    return sum(shard.data.nbytes for x in jax.tree.leaves(params) for shard in x.addressable_shards)


def check(geometry: Geometry, moves: PageMoves) -> Placed:
    """Of few bytes and with a bounded staging.

    Sequences hold four pages each, one of them with the next; where one stays behind all stay that no
    other holds.
    """
    every = np.arange(len(moves.old_page))
    holds = [every[k : k + 4] for k in every[::3]]
    result = placed(moves, holds, *geometry.pools)
    goes = result.new_page != NULL_PAGE
    kept = np.concatenate([every[:0], *(mine for mine in holds if goes[mine].all())])
    assert np.array_equal(np.unique(kept), np.flatnonzero(goes))
    sent = sum(one.round.slots(geometry.narrow.replicas) for one in result.shipments)
    assert sent <= (1 + MOST_EMPTY) * goes.sum()
    assert most_waiting(geometry, result.shipments) <= order.MOST_WAITING
    return result


def most_waiting(geometry: Geometry, shipments: list[Shipment]) -> float:
    """Pages of a replica, in rounds that have arrived and not been put; of one replica each device
    gets a part."""
    waits: dict[int, float] = {}
    most = 0.0
    for number, one in enumerate(shipments):
        is_part = geometry.is_up and one.round.replica != ALL
        waits[number] = one.round.size / (geometry.members if is_part else 1)
        for other in one.put:
            del waits[other]
        most = max(most, sum(waits.values()))
    return most


def fewest(geometry: Geometry, moves: PageMoves) -> int:
    """Rounds, if pools were two memories."""
    replica = moves.old_replica if geometry.is_up else moves.new_replica
    return len(rounds(np.bincount(replica, minlength=geometry.narrow.replicas)))


@settings(deadline=None, max_examples=150)
@given(
    st.builds(
        Geometry,
        wide_replicas=st.integers(1, 2),
        ways=st.sampled_from([1, 2, 3, 4]),
        copies=st.sampled_from([1, 2]),
        pages=st.integers(2, 60),
        is_up=st.booleans(),
    ),
    st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(0, 10**6),
)
def test_every_page_goes(geometry, fill, skew, seed):
    """Where TP falls, replicas hold unlike numbers of pages and heads have copies, some stay."""
    moves = drawn(geometry, np.random.default_rng(seed), fill, skew)
    goes = check(geometry, moves).new_page != NULL_PAGE
    assert goes.all() or (not geometry.is_up and skew > 0 and geometry.copies > 1)


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("most", [0, 1, 5])
def test_what_would_wait_where_it_may_not_stays_behind(monkeypatch, most, is_up):
    monkeypatch.setattr(order, "MOST_WAITING", most)
    geometry, stay = Geometry(wide_replicas=2, ways=4, copies=1, pages=60, is_up=is_up), []
    for seed in range(20):
        moves = drawn(geometry, np.random.default_rng(seed), fill=0.95, skew=0.3)
        stay.append((check(geometry, moves).new_page == NULL_PAGE).mean())
    assert 0 < np.mean(stay) < 0.5


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize(
    ("ways", "pages", "fill", "skew"), [(2, 400, 1.0, 0.0), (8, 400, 1.0, 0.0), (8, 500, 0.9, 0.3)]
)
def test_a_large_pool_takes_no_more_rounds_than_two_memories(is_up, ways, pages, fill, skew):
    """Scattered pages included: free memory that eight replicas have in common is rare then."""
    geometry = Geometry(wide_replicas=1, ways=ways, copies=1, pages=pages, is_up=is_up)
    moves = drawn(geometry, np.random.default_rng(0), fill, skew)
    assert len(check(geometry, moves).shipments) == fewest(geometry, moves)
