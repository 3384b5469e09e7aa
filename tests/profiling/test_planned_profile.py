"""A plan by a user's own profile: it has to be of what is planned."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fakes import SPLITS, made_up_latency

from pat_jax.common.errors import UserError
from pat_jax.engine.device.draft.drafters import NO_DRAFTER
from pat_jax.models.presets import preset
from pat_jax.planning.latency.profile import Profile, Subject
from pat_jax.profiling.capacity.costs import profiled
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.cross_compile.target_build import Order
from pat_jax.profiling.predict.targets import Target

TARGET, MODEL = Target.parse("h100:8"), preset("qwen3-0.6b")
ASKED = PlanConfig(model="qwen3-0.6b", max_completion_length=24_576)
BUILD = by_arithmetic(Order.of(TARGET, ASKED.run(TARGET), MODEL, (2, 4)))
SUMS = {("all-reduce", n, 4096): 1e-4 for n in (2, 4, 8)}
SUBJECT = Subject("gpu", "NVIDIA H100", 8, asdict(MODEL), "bfloat16", "0.10.2")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_devices": 4}, "devices 4, not 8"),
        ({"backend": "cpu"}, "backend cpu, not gpu"),
        ({"dtype": "float32"}, "dtype float32, not bfloat16"),
        ({"weights": "int8"}, "weights int8, not auto"),
        ({"model": asdict(preset("qwen3-1.7b"))}, "embed_dim 2048, not 1024"),
        ({"model": asdict(replace(MODEL, vocab_size=9))}, "vocab_size 9, not 151936"),
        ({"model": asdict(replace(MODEL, head_dim=64))}, "head_dim 64, not 128"),
        ({"model": {}}, "architecture None, not qwen3"),
    ],
)
def test_a_profile_of_something_else_is_refused(tmp_path: Path, other, words: str):
    steps = dict.fromkeys(SPLITS, 0.1)
    latency = made_up_latency(steps, steps, reshard=1, migrate_per_token=1, max_rows=2)
    path = tmp_path / "profile.json"
    Profile(SUBJECT, latency, SUMS).save(path)
    assert profiled(path, BUILD.order, BUILD.buckets, NO_DRAFTER).source == "profile"
    Profile(replace(SUBJECT, **other), latency, SUMS).save(path)
    with pytest.raises(UserError, match="of something else") as caught:
        profiled(path, BUILD.order, BUILD.buckets, NO_DRAFTER)
    assert words in str(caught.value)
