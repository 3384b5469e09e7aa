"""A profile of several devices from one: the same layouts, buckets and work as on all of them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from pat_jax.common.errors import UserError
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.shard_profile import ShardProfiler, layouts_of, shard_of
from pat_jax.profiling.predict.targets import Target

CONFIG = RolloutConfig(
    prompts_per_step=4,
    num_generations=2,
    max_prompt_length=16,
    max_completion_length=16,
    min_length=32,
    min_rows=4,
    prefill_blocks=2,
    check_every=2,
    burst_steps=4,
)
TINY = ModelConfig("qwen3", 64, 32, 64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b"])
def test_the_shards_of_a_group_make_up_the_model(name: str):
    model = replace(preset(name), num_layers=1)

    def matrices(config: ModelConfig) -> int:
        leaves = jax.tree.leaves(Policy.from_config(config).abstract(jnp.bfloat16))
        return sum(x.size for x in leaves if x.ndim > 1)

    for split, layout in layouts_of(Target.parse("h100:8"), model).items():
        if model.num_kv_heads % split.tp == 0:  # else some are there several times
            assert split.tp * matrices(shard_of(model, layout)) == matrices(model)


@pytest.fixture(scope="module")
def profiler() -> ShardProfiler:
    device = jax.devices()[0]
    return ShardProfiler(TINY, Target.parse("h100:2"), CONFIG, device, jnp.float32, 8, runs=1)


def test_every_program_that_the_target_would_time_has_a_time(profiler: ShardProfiler):
    ticks: list[tuple[int, int]] = []
    latency = profiler.measure(lambda done, total: ticks.append((done, total)))
    engine = RolloutEngine(
        Policy.from_config(TINY), jax.devices()[:2], CONFIG, capacity=8, eos_ids=(0,)
    )
    buckets = engine.specs.buckets
    assert latency.decode_table.keys() == {
        (split, rows, length)
        for split in engine.layouts
        for rows in buckets.rows[split]
        for length in buckets.lengths
    }
    assert latency.prefill_table.keys() == {
        (split, length) for split in engine.layouts for length in buckets.lengths
    }
    both = (Split(2, 1), Split(1, 2))
    assert latency.reshard_table.keys() == {both, both[::-1]}
    assert latency.shift_round(both[0]) > 0.0
    assert latency.round_tokens == 32 * CONFIG.page_size
    assert ticks[-1][0] == ticks[-1][1] and [done for done, _ in ticks] == sorted(
        {done for done, _ in ticks}
    )
    # The links come on top of what this machine takes.
    links = profiler.composer.decode_links_s(8, Split(1, 2))
    assert 0 < links < latency.decode_step(Split(1, 2), 8, 32)


def test_a_model_without_a_shard_that_fits_is_refused():
    config = RolloutConfig(max_prompt_length=96, max_completion_length=160, device_memory_gib=0.001)
    device, target = jax.devices()[0], Target.parse("h100:8")
    model = replace(preset("llama-3.1-8b"), num_layers=2)
    profiler = ShardProfiler(model, target, config, device, jnp.bfloat16, 8)
    with pytest.raises(
        UserError, match=r"^option --shards is 'h100:8': .* none has a shard that fits"
    ):
        profiler.engines  # noqa: B018
