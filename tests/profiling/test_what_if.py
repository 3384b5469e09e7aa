"""A measured machine, changed: what changes is what was asked for, and nothing else."""

from dataclasses import asdict, replace

import pytest
from fakes import SPLITS, made_up_latency

from pat_jax.common.errors import UserError
from pat_jax.models.presets import preset
from pat_jax.planning.latency.profile import Profile, Subject
from pat_jax.profiling.capacity.what_if import WhatIf, machine_of, sums_of, unmeasured

MODEL = preset("llama-3.1-8b")
DP8, *_ = SPLITS
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


def test_sums_of_a_step():
    """A row of Llama-3.1-8B is 8 KiB; a step sums 65 times."""
    for split, rows, _ in LATENCY.decode_table:
        expected = 0 if split.tp == 1 else 65 * rows * 2 * SUM_S
        assert sums_of(PROFILE)(split, rows) == pytest.approx(expected)
    with pytest.raises(UserError, match=r"sum over 2 devices.*measure it again"):
        sums_of(replace(PROFILE, collectives={}))


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
