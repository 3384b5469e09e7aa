"""Migrations of pages against a pool built in NumPy and put onto the target's shards."""

from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanges import Geometry, drawn
from fakes import SETTINGS, subject
from hypothesis import given
from hypothesis import strategies as st
from page_pools import CASES, PAGE_SIZE, Programs, assert_pages_arrived, chain, put

from pat_jax.engine.device.pages.migration import Migration
from pat_jax.engine.device.pages.pages import Exchange, put_at_once, put_in_turn, view
from pat_jax.engine.device_executor import DeviceExecutor, DevicePool
from pat_jax.engine.relocation.order import placed
from pat_jax.engine.relocation.rounds import ALL, MOST_EMPTY, rounds
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
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
