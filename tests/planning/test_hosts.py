"""A layout across hosts has to be shown to pay before it is a candidate."""

from dataclasses import replace

from fakes import SPLITS, made_up_latency
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.sizing.layout_choice import is_measured, pays_across_hosts
from pat_jax.planning.latency.model import LatencyModel

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
EVERYWHERE = {DP8: 0.4, DP4TP2: 0.3, DP2TP4: 0.2, TP8: 0.1}


def latency(step: dict, per_row: float = 0.0) -> LatencyModel:
    rows = {split: per_row * split.tp for split in step}
    return made_up_latency(step, rows, reshard=0.1, migrate_per_token=1e-4, max_rows=8)


@given(st.floats(0.01, 1.0), st.floats(0.0, 0.1))
def test_it_pays_where_one_bucket_is_faster(step, per_row):
    measured = latency(EVERYWHERE | {TP8: step}, per_row)
    table = measured.decode_table
    faster = [table[(TP8, n, m)] < table[(DP2TP4, n, m)] for n in range(1, 9) for m in (64, 128)]
    assert pays_across_hosts(measured, TP8, DP2TP4) == any(faster)


def test_buckets_that_only_one_of_them_has_say_nothing():
    measured = latency(EVERYWHERE)
    only = {k: s for k, s in measured.decode_table.items() if k[0] == TP8 or k[1] > 4}
    few = {k: s for k, s in only.items() if k[0] != TP8 or k[1] <= 4}
    assert is_measured(replace(measured, decode_table=few), TP8)
    assert not pays_across_hosts(replace(measured, decode_table=few), TP8, DP2TP4)
