"""Sequences that move between the replicas of a layout: who, with which pages, and what they say
then."""

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import jax
import numpy as np
import pytest
from fakes import SETTINGS, subject
from hypothesis import given
from hypothesis import strategies as st
from page_pools import CASES, PAGE_SIZE, Programs, assert_pages_arrived, chain, put

from pat_jax.engine.cache_manager import CacheManager
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.device.pages.migration import shifted
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.page_reserve import PageReserve
from pat_jax.engine.sequences.prefill_calls import PageMoves
from pat_jax.engine.sequences.responses import Completion, Request, Responses
from pat_jax.engine.sequences.sequence_table import SequenceTable, evened, options
from pat_jax.engine.sizing.pool_pages import page_bytes
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Load, Plan, Split
from tests.lossless import EOS_IDS

DP8, DP4 = Split(8, 1), Split(4, 2)


@st.composite
def sequences(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """Replicas and pages of some, and how many replicas there are."""
    dp = draw(st.sampled_from([2, 3, 4, 8]))
    members = st.tuples(st.integers(0, dp - 1), st.integers(1, 40))
    replica, pages = np.array(draw(st.lists(members, min_size=1, max_size=40))).T
    return replica, pages, dp


class TestWhoGoesWhere:
    @given(sequences(), st.integers(0, 5))
    def test_as_few_as_can_those_with_fewest_pages(self, given, slack):
        replica, pages, dp = given
        most = -(-len(replica) // dp) + slack
        before = np.bincount(replica, minlength=dp)
        new = evened(replica, pages, np.full(dp, pages.sum()), most)
        assert new is not None and np.bincount(new).max() <= most
        surplus = np.maximum(before - most, 0)
        for g in range(dp):
            mine = replica == g
            gone = np.sort(pages[mine & (new != g)])
            assert gone.tolist() == np.sort(pages[mine])[: surplus[g]].tolist()
            arrived = ((new == g) & ~mine).sum()
            assert not (len(gone) and arrived)

    @given(sequences(), st.data())
    def test_no_group_gets_more_pages_than_it_has(self, given, data):
        replica, pages, dp = given
        free = np.array(data.draw(st.lists(st.integers(0, 60), min_size=dp, max_size=dp)))
        kept = free.copy()
        new = evened(replica, pages, free, -(-len(replica) // dp))
        np.testing.assert_array_equal(free, kept)
        if new is not None:
            moved = new != replica
            assert (np.bincount(new[moved], pages[moved], minlength=dp) <= free).all()

    def table(self, counts: list[int], waiting: int = 0) -> SequenceTable:
        ones = np.ones(sum(counts) + waiting, int)
        table = SequenceTable(
            10 * ones, 50 * ones, num_replicas=len(counts), rows_per_replica=max(counts)
        )
        seated = np.arange(sum(counts))
        table.add(seated, np.repeat(np.arange(len(counts)), counts))
        return table

    @pytest.mark.parametrize(
        "counts, waiting, buckets",
        [
            ([9, 3, 4, 2], 0, [5, 8]),
            ([9, 1, 0, 2], 0, [3, 4, 8]),
            ([9, 1, 0, 2], 1, []),  # who waits gets the free rows
            ([8, 8, 8, 7], 0, []),
            ([4, 1, 0, 1], 0, [2]),
            ([1, 0, 0, 0], 0, []),
            ([9], 0, []),
        ],
    )
    def test_each_smaller_bucket_that_could_hold_them_is_an_option_and_to_be_even(
        self, counts, waiting, buckets
    ):
        table = self.table(counts, waiting)
        running = table.running
        found = options(
            table, np.ones(len(running), int), np.full(len(counts), 100), (1, 2, 4, 8, 16)
        )
        assert [int(np.bincount(new).max()) for new in found] == buckets


class TestPages:
    def test_pages_laid_out_for_bursts_on_their_way_count_as_free(self):
        """Three in one replica, one long in the other, which two fit only when its reserve is
        back."""
        known = [tuple(range(10, 50)), (1, 2, 3), (4, 5, 6), (7, 8, 9)]
        requests = [Request(text, np.zeros(2, np.uint32), 9) for text in known]
        responses = Responses.of(requests, num_replicas=2, rows_per_replica=4)
        cache_manager = CacheManager(responses, num_pages=16, page_size=4)
        for i, replica in enumerate([0, 1, 1, 1]):
            assert cache_manager.admissions.admit(i, replica, 1) is not None
        responses.table.add(np.arange(4), np.array([0, 1, 1, 1]))
        before = cache_manager.balance_options((1, 2, 4), 0)
        assert [int(np.bincount(new).max()) for new in before] == [2]
        reserve = PageReserve(cache_manager.tables.pools, size=8)
        reserve.fill(np.array([5, 5]))
        assert cache_manager.balance_options((1, 2, 4), 0) == []
        np.testing.assert_array_equal(
            cache_manager.balance_options((1, 2, 4), reserve.left), before
        )


def drawn_pages(rng: np.random.Generator, replicas: np.ndarray, num_pages: int) -> np.ndarray:
    """For each entry a page of its replica that no other has."""
    pages = np.empty(len(replicas), int)
    for replica in set(replicas.tolist()):
        mine = replicas == replica
        pages[mine] = 1 + rng.permutation(num_pages - 1)[: mine.sum()]
    return pages


def even_to_odd(rng: np.random.Generator, dp: int, num_pages: int, least: int) -> PageMoves:
    """From `least` to seven pages from each even replica to each odd one."""
    pairs = list(product(range(0, dp, 2), range(1, dp, 2)))
    old, new = np.repeat(pairs, rng.integers(least, 8, len(pairs)), axis=0).T
    old_page, new_page = (drawn_pages(rng, replicas, num_pages) for replicas in (old, new))
    return PageMoves(old, old_page, new, new_page)


@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=str)
def test_pages_arrive_in_their_group_and_no_other_changes(case):
    """From the even replicas to the odd ones, in every layout that has several."""
    rng = np.random.default_rng(case)
    for layout in chain(*case).values():
        dp, num_pages = layout.split.dp, 64
        if dp == 1:
            continue
        old, old_page, new, new_page = moves = even_to_odd(rng, dp, num_pages, least=0)
        x = rng.normal(size=(num_pages * dp, case[1], PAGE_SIZE, 2)).astype(np.float32)
        expected = x.copy()
        expected[new * num_pages + new_page] = x[old * num_pages + old_page]
        programs = Programs(layout)
        arrived, sent = shifted(programs, layout, put(x, layout), moves)  # type: ignore[arg-type]
        assert_pages_arrived(arrived, np.arange(len(x)), expected, layout)
        # Every device of a replica sends its heads of keys and values, copies of heads as well.
        heads = case[1] // layout.size(layout.kv_axes)
        page = 4 * 2 * heads * PAGE_SIZE * 2 * layout.split.tp
        assert sent.least == len(old) * page <= sent.total


@dataclass(frozen=True)
class Eager(FixedLayout):
    """Takes the option with the fewest rows whenever there is one."""

    seen: list[tuple[Load, np.ndarray]] = field(default_factory=list)

    def decide(self, load: Load, current: Split, options=()) -> Plan:
        plan = super().decide(load, current, options)
        if not options:
            return plan
        self.seen.append((load, options[0]))
        return replace(plan, replica=options[0])


@cache
def engine() -> RolloutEngine:
    """32 sequences: eight replicas of four rows or four of eight; each program when it is
    needed."""
    every = subject("kv2").engine.layouts
    return RolloutEngine(
        subject("kv2").policy,
        jax.devices(),
        replace(SETTINGS["kv2"].rollout, min_rows=1, min_length=64),
        capacity=32,
        eos_ids=EOS_IDS,
        layouts={split: every[split] for split in (DP8, DP4)},
    )


def run(
    requests: list[Request], planner: Planner, split: Split
) -> tuple[list[Completion], RolloutReport]:
    layout = engine().layouts[split]
    weights = jax.device_put(subject("kv2").params, layout.param_shardings(engine().policy))
    engine().set_weights(weights, layout)
    done = engine().rollout(requests, planner)
    engine().release_weights()
    return done


def uneven(seed: int) -> list[Request]:
    """Four samples of each of eight prompts; of one prompt all are long, of the others hardly any."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(3, 61, rng.integers(9, 13)).tolist()) for _ in range(8)]
    lengths = rng.integers(2, 12, (8, 4))
    lengths[0] = 50, 44, 47, 38
    lengths[1:3, 0] = 48, 30
    return [
        Request(prompts[p], sequence_key(seed, 4 * p + i), int(lengths[p, i]), ignore_eos=True)
        for p in range(8)
        for i in range(4)
    ]


@pytest.mark.parametrize("split", [DP8, pytest.param(DP4, marks=pytest.mark.slow)], ids=str)
def test_balancing_changes_no_token(split):
    requests = uneven(0)
    expected, plain = run(requests, FixedLayout(split), split)
    planner = Eager(split)
    found, report = run(requests, planner, split)
    total = subject("kv2").compared(requests, expected, found)
    assert total.unexplained == total.judge_disagrees == 0
    assert total.compared > 0.95 * total.tokens > 300
    assert total.max_logprob_difference <= 1e-4
    assert plain.balanced == [] and len(report.balanced) == len(planner.seen) > 0
    assert report.prefill_tokens == plain.prefill_tokens and report.preempted == 0
    # As many steps, with fewer rows.
    assert (report.tokens, report.decode_steps) == (plain.tokens, plain.decode_steps)
    assert report.total_rows < 0.8 * plain.total_rows
    for done, (load, replica) in zip(report.balanced, planner.seen, strict=True):
        moved = replica != load.replica
        assert done.sequences == moved.sum() > 0
        assert done.fullest == (np.bincount(load.replica).max(), np.bincount(replica).max())
        assert done.fullest[1] < done.fullest[0]
        # The pages that are filled, less those of a prompt of which the replica has some.
        size = engine().specs.page_size
        filled, prompts = -(-load.context[moved] // size), (load.context - load.generated) // size
        assert done.sent is not None and done.sent.total >= done.sent.least
        pages = done.sent.least / page_bytes(engine().policy.config, size, engine().dtype)
        assert (filled - prompts[moved]).sum() <= pages <= filled.sum()
        assert done.seconds > 0


def test_balancing_changes_no_token_with_a_burst_on_its_way(monkeypatch):
    """It is planned before the burst's results are known, and again once they are."""
    requests = uneven(0)
    expected, plain = run(requests, FixedLayout(DP8), DP8)
    monkeypatch.setattr(engine(), "runs_ahead", True)
    planner = Eager(DP8)
    found, report = run(requests, planner, DP8)
    total = subject("kv2").compared(requests, expected, found)
    assert total.unexplained == total.judge_disagrees == 0
    assert total.compared > 0.95 * total.tokens > 300
    assert 0 < len(report.balanced) < len(planner.seen)
    assert (report.tokens, report.preempted) == (plain.tokens, 0)
    assert report.total_rows < plain.total_rows
