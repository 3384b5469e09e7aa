"""Which drafts the planner makes, by rows and by what they are expected to say."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency, make_load
from hypothesis import given
from hypothesis import strategies as st
from made_up_machines import DP8, FASTER_WITH_TP, TP8, lengths_of, machine

from pat_jax.layout.buckets import Drafts
from pat_jax.planning.draft_counts import KINDS, NONE_DRAFTED, DraftResult
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.planner.costs import LARGE_S, CostTables
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import BurstResult, Split

DRAFTS = Drafts(num_draft_tokens=(1, 3, 7), longest=7, most_tokens=256)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
BASE = machine(FASTER_WITH_TP).on(dict.fromkeys(FASTER_WITH_TP, ROWS), (64, 512))


def drafting(dearer: float = 1.02):
    """A step takes `dearer` times as long for each token of the budget; rows are free."""
    verify = {
        (split, rows, length, num_draft_tokens): seconds * dearer**num_draft_tokens
        for (split, rows, length), seconds in BASE.decode_table.items()
        for num_draft_tokens in DRAFTS.of(rows)
    }
    return replace(BASE, verify_table=verify)


def planner(acceptance: Acceptance, latency=None) -> CostModelPlanner:
    beliefs = {"acceptance": acceptance, "drafts": DRAFTS.limits}
    return CostModelPlanner((TP8,), latency or drafting(), lengths_of((100, 1000)), **beliefs)


TRIED = np.full_like(Acceptance.unseen().proposed, 1e6)
NOTHING = replace(Acceptance.unseen(), proposed=TRIED, accepted=1e-3 * TRIED)


@pytest.mark.parametrize(
    ("running", "least"), [(2, 3), (8, 3), (30, 3), (50, 1), (100, 1), (129, 0)]
)
def test_trials_are_made_with_the_smallest_budget_that_has_a_program(running: int, least: int):
    one, load = planner(NOTHING), make_load(running, TP8)
    assert one.decide(load, TP8).num_draft_tokens == 0, "nothing was lost yet that a trial may cost"
    one.observe(BurstResult(TP8, 128, 64, running, running * 20.0, 1000, 200.0))
    assert one.decide(load, TP8).num_draft_tokens == least


def test_what_came_of_drafts_is_expected_of_the_next_ones():
    one, load = planner(Acceptance.unseen()), make_load(8, TP8)
    before = one.decide(load, TP8).predicted
    assert before is not None and before.tokens > 1.3
    counts = DraftResult(*(np.sum(x, axis=0) for x in NONE_DRAFTED))._replace(
        begun=10_000 * np.eye(KINDS)[0]
    )
    one.observe(counts)
    one.start(load)
    after = one.decide(load, TP8).predicted
    assert after is None or after.tokens < 1.1


def test_budgets_that_only_other_layouts_have_are_none():
    """Replicas of another layout are so small that their bursts have larger ones."""
    few = {
        key: seconds
        for key, seconds in drafting().verify_table.items()
        if key[0] != TP8 or key[1] <= 16
    }
    latency = replace(BASE, verify_table=few)
    assert [n for n, _ in CostTables.of(latency, (DP8, TP8)).verifying] == [1, 3, 7]
    assert [n for n, _ in CostTables.of(latency, (TP8,)).verifying] == [3, 7]
    assert planner(Acceptance.unseen(), latency).decide(
        make_load(8, TP8), TP8
    ).num_draft_tokens in (3, 7)


def test_the_fewer_rows_of_a_bucket_are_live_the_more_each_is_expected_to_say():
    """Steps cost the same, whatever is running; 64 rows fill a bucket, 33 leave half of its
    room."""
    one, plain = planner(Acceptance.unseen()), planner(NOTHING)
    seconds = {n: one.decide(make_load(n, TP8), TP8).predicted_remaining_s for n in (33, 45, 64)}
    assert seconds[33] < seconds[45] < seconds[64]
    alone = [plain.decide(make_load(n, TP8), TP8).predicted_remaining_s for n in (33, 64)]
    np.testing.assert_allclose(*alone, rtol=0.01)
    # Between what rows say with a budget of three and with the room that half as many have.
    tokens = [Acceptance.unseen().tokens(room, DRAFTS.longest, 64) for room in (3, 7)]
    assert alone[0] / seconds[64] == pytest.approx(tokens[0] / 1.02**3, rel=0.05)
    assert alone[0] / seconds[33] < tokens[1]


@pytest.mark.parametrize(
    ("running", "times", "drafts"), [(8, 2.0, True), (8, 0.5, False), (1, 0.0, True)]
)
def test_sequences_that_a_draft_models_cache_has_no_room_for_draft_nothing(running, times, drafts):
    """But the last one, and what there is room for later is in the plan."""
    load, lengths = make_load(running, TP8, prompt=400), lengths_of((20, 900), (100, 100))
    limits = DRAFTS.limits._replace(cached=times * float(load.context.sum()))
    plain, free = (replace(planner(x), lengths=lengths) for x in (NOTHING, Acceptance.unseen()))
    plan = replace(free, drafts=limits).decide(load, TP8)
    assert (plan.num_draft_tokens > 0) == drafts
    assert plan.predicted_remaining_s < plain.decide(load, TP8).predicted_remaining_s


LATENCY = made_up_latency(
    {split: 1.0 / split.tp for split in SPLITS},
    {split: 0.01 * split.tp for split in SPLITS},
    reshard=0.5,
    migrate_per_token=0.1,
    prefill=0.3,
    lengths=(64, 100, 128),
)
LATENCY = replace(LATENCY, prefill_table={key: 0.01 * key[1] for key in LATENCY.prefill_table})
TABLES = CostTables.of(LATENCY, SPLITS)


READING = replace(LATENCY, reads="held")
SPARSE = replace(
    READING, decode_table={at: s for at, s in READING.decode_table.items() if at[1] % 4 == 0}
)


@pytest.mark.parametrize("latency", [READING, SPARSE], ids=["one row known", "four at least"])
@given(
    st.lists(st.tuples(*[st.floats(0.1, 200)] * 4), min_size=1, max_size=5),
    st.integers(1, 500),
    st.floats(0.0, 1.0),
)
def test_every_step_that_reads_what_rows_hold_is_the_latency_models(latency, rows, context, share):
    fullest = np.array(rows).T
    contexts = context + 30 * np.arange(len(rows))
    steps = CostTables.of(latency, SPLITS).steps(fullest, contexts, share * contexts)
    for i, split in enumerate(SPLITS):
        for j, length in enumerate(contexts.tolist()):
            n = int(np.ceil(fullest[i, j]))
            held = fullest[i, j] * share * length
            assert steps[i, j] == pytest.approx(latency.decode_step(split, n, length, held))


@given(
    st.lists(st.tuples(*[st.floats(0.1, 200)] * 4), min_size=1, max_size=5),
    st.integers(1, 500),
)
def test_every_price_is_the_latency_models(rows, context):
    fullest = np.array(rows).T
    contexts = context + 30 * np.arange(len(rows))
    steps = TABLES.steps(fullest, contexts, contexts)
    running = np.array([[8], [4], [3], [2]]) * fullest.max(axis=0)
    migrations = TABLES.migrations(fullest, running, contexts)
    recomputations = TABLES.recomputations(fullest, contexts)
    for j, length in enumerate(contexts.tolist()):
        for i, split in enumerate(SPLITS):
            n = int(np.ceil(fullest[i, j]))
            assert steps[i, j] == pytest.approx(LATENCY.decode_step(split, n, length))
            assert recomputations[i, j] == pytest.approx(LATENCY.recompute(split, n, length))
            for k, target in enumerate(SPLITS):
                expected = (
                    0.0
                    if i == k
                    else LATENCY.migrate(split, target, fullest[i, j], running[i, j], length)
                )
                assert migrations[i, k, j] == pytest.approx(expected)


def test_layouts_may_have_buckets_of_their_own():
    one, two = Split(2, 1), Split(1, 2)
    model = LatencyModel(
        decode_table={(one, 3, 8): 1.0, (one, 5, 8): 2.0, (two, 4, 16): 4.0, (two, 8, 16): 8.0},
        reshard_table={(one, two): 1.0},
        migrate_table={(one, two, "all"): 7.0, (one, two, "one"): 5.0},
        prefill_table={(two, 16): 1.0},
        prefill_blocks=1,
        page_size=8,
        round_tokens=16,
    )
    tables = CostTables.of(model, (one, two))
    for rows in (1, 3, 4, 5):
        prices = tables.steps(np.full((2, 1), rows), np.array([8]), np.array([8]))[:, 0]
        expected = [model.decode_step(split, rows, 8) for split in (one, two)]
        np.testing.assert_allclose(prices, expected)
    # Three rows of eight tokens, two of them in one replica: half a round of both, then of one.
    migrations = tables.migrations(np.full((2, 1), 2), np.full((2, 1), 3), np.array([8]))
    assert migrations[0, 1, 0] == 0.5 * 7.0 + 0.5 * 5.0
    # What nobody measured is priced out of reach, not guessed.
    assert migrations[1, 0, 0] >= LARGE_S / 2
    assert tables.reshard[1, 0] >= LARGE_S
