"""A measured machine, changed in what was asked for and in nothing else; a user's profile has to be of what is
planned."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fakes import SPLITS, made_up_latency
from orders import order_of

from pat_jax.common.errors import UserError
from pat_jax.engine.device.draft.drafters import NO_DRAFTER
from pat_jax.models.presets import preset
from pat_jax.planning.latency.profile import Profile, Subject
from pat_jax.profiling.capacity.costs import profiled
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.what_if import WhatIf, machine_of, unmeasured
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.predict.targets import Target

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
PROFILE = Profile(
    Subject("gpu", "made up", 8, asdict(MODEL), "bfloat16", "0"),
    LATENCY,
)
AS_IT_IS = WhatIf(responses=16, cap=96, longest_prompt=32)


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
    assert "dp1tp8 beyond 16 rows a replica (up to 64)" in told and "dp8tp1" not in told


TARGET, SMALL = Target.parse("h100:8"), preset("qwen3-0.6b")
ASKED = PlanConfig(model="qwen3-0.6b", max_completion_length=24_576)
BUILD = by_arithmetic(order_of(TARGET, ASKED.run(TARGET), SMALL, (2, 4)))
SUBJECT = Subject("gpu", "NVIDIA H100", 8, asdict(SMALL), "bfloat16", "0.10.2")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_devices": 4}, "devices 4, not 8"),
        ({"backend": "cpu"}, "backend cpu, not gpu"),
        ({"dtype": "float32"}, "dtype float32, not bfloat16"),
        ({"weights": "int8"}, "weights int8, not auto"),
        ({"model": asdict(preset("qwen3-1.7b"))}, "embed_dim 2048, not 1024"),
        ({"model": asdict(replace(SMALL, vocab_size=9))}, "vocab_size 9, not 151936"),
        ({"model": asdict(replace(SMALL, head_dim=64))}, "head_dim 64, not 128"),
        ({"model": {}}, "architecture None, not qwen3"),
    ],
)
def test_a_profile_of_something_else_is_refused(tmp_path: Path, other, words: str):
    steps = dict.fromkeys(SPLITS, 0.1)
    latency = made_up_latency(steps, steps, reshard=1, migrate_per_token=1, max_rows=2)
    path = tmp_path / "profile.json"
    Profile(SUBJECT, latency).save(path)
    assert profiled(path, BUILD.order, BUILD.buckets, NO_DRAFTER).source == "profile"
    Profile(replace(SUBJECT, **other), latency).save(path)
    with pytest.raises(UserError, match="of something else") as caught:
        profiled(path, BUILD.order, BUILD.buckets, NO_DRAFTER)
    assert words in str(caught.value)
