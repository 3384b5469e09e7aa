"""A measured machine, changed: what changes is what was asked for, and nothing else."""

from dataclasses import asdict, replace

import pytest
from fakes import SPLITS, made_up_latency

from pat_jax.common.errors import UserError
from pat_jax.models.presets import preset
from pat_jax.planning.latency.profile import Profile, Subject
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.what_if import (
    WhatIf,
    machine_of,
    sums_of,
    unmeasured,
    with_slower_links,
)

MODEL = preset("llama-3.1-8b")
DP8, _, _, TP8 = SPLITS
LATENCY = made_up_latency(
    dict(zip(SPLITS, (0.5, 0.4, 0.3, 0.25), strict=True)),
    dict.fromkeys(SPLITS, 0.01),
    reshard=0.2,
    migrate_per_token=1e-3,
    max_rows=16,
    lengths=(64, 128),
)
SUM_S = 1e-4  # of 4 KiB; of 16 KiB four times as much
PROFILE = Profile(
    Subject("gpu", "made up", 8, asdict(MODEL), "bfloat16", "0"),
    LATENCY,
    {("all-reduce", tp, 4096 * n): SUM_S * n for tp in (2, 4, 8) for n in (1, 4)},
)
AS_IT_IS = WhatIf(responses=16, cap=96, longest_prompt=32)


def test_slower_links_cost_what_their_sums_cost():
    """A row of Llama-3.1-8B is 8 KiB; a step sums 65 times."""
    slower = with_slower_links(PROFILE, 3)
    for key, seconds in LATENCY.decode_table.items():
        split, rows, _ = key
        expected = 0 if split.tp == 1 else 2 * 65 * rows * 2 * SUM_S
        assert slower.decode_table[key] - seconds == pytest.approx(expected)
        assert sums_of(PROFILE)(split, rows) == pytest.approx(expected / 2)
    assert slower.migrate_table == {key: 3 * s for key, s in LATENCY.migrate_table.items()}
    for (source, target), seconds in slower.reshard_table.items():
        assert seconds == pytest.approx(0.2 * (3 if target.tp < source.tp else 1))
    at = TP8, 16, 128, 3  # 64 tokens
    verifying = replace(LATENCY, verify_table={at: 0.5})
    slower = with_slower_links(replace(PROFILE, latency=verifying), 3)
    assert slower.verify_table[at] - 0.5 == pytest.approx(2 * 65 * 64 * 2 * SUM_S)
    # Three passes of 16 tokens through eight layers besides.
    slower = with_slower_links(replace(PROFILE, latency=verifying), 3, exit_layer=8)
    output = 3 * 17 * 16
    assert slower.verify_table[at] - 0.5 == pytest.approx(2 * (65 * 64 + output) * 2 * SUM_S)
    assert with_slower_links(PROFILE, 1).decode_table == pytest.approx(LATENCY.decode_table)


def test_without_measured_sums_links_cannot_be_slower():
    with pytest.raises(UserError, match=r"sum over 2 devices.*measure it again"):
        with_slower_links(replace(PROFILE, collectives={}), 2)


def test_the_machine_has_the_buckets_that_are_needed():
    machine = machine_of(PROFILE, replace(AS_IT_IS, host_us=20))
    assert machine.host_s_per_sequence == pytest.approx(2e-5)
    assert machine.buckets.lengths == (64, 128) and machine.splits == SPLITS
    assert machine.capacity == 16 and not machine.has_pools and machine.runs_ahead
    assert unmeasured(PROFILE, machine) == ""
    assert machine.truth.decode_step(DP8, 2, 128) == LATENCY.decode_step(DP8, 2, 128)
    larger = machine_of(PROFILE, replace(AS_IT_IS, responses=64, cap=1000))
    told = unmeasured(PROFILE, larger)
    assert "contexts beyond 128 tokens (up to 1,088)" in told
    assert "dp1tp8 beyond 16 rows a group (up to 64)" in told and "dp8tp1" not in told


def test_memory_leaves_out_what_has_no_room():
    """16 GB of weights: in dp8tp1 on every device, in dp1tp8 an eighth of them."""
    machine = machine_of(PROFILE, replace(AS_IT_IS, device_memory_gib=10))
    assert machine.has_pools and DP8 not in machine.splits and TP8 in machine.splits
    assert machine.memory is not None
    weights = machine.memory.weights[TP8] * 8 / 2**30
    assert weights == pytest.approx(2 * 8.03e9 / 2**30, rel=0.01)
    with pytest.raises(UserError, match="device_memory_gib is 1: no layout fits, dp1tp8 needs"):
        machine_of(PROFILE, replace(AS_IT_IS, device_memory_gib=1))


def test_a_question_says_what_is_other():
    assert str(AS_IT_IS) == "16 responses, cap 96"
    changed = replace(AS_IT_IS, responses=2048, link_slowdown=4, host_us=20)
    assert str(changed) == "2,048 responses, cap 96, links 4x slower, host +20 us a sequence"
    assert Split(8, 1) == DP8
