"""Dense tables against the latency model's own look-ups, one by one."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS, made_up_latency
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.planner.costs import LARGE_S, CostTables
from pat_jax.planning.types import Split

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
