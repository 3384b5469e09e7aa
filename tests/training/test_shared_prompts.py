"""The rows that a run has for responses that share their prompt."""

from dataclasses import replace

import pytest

from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.run import RunConfig
from pat_jax.models.kernels.row_attention import knows_branches
from pat_jax.training.build import micro_shapes, shares_prompts


def config(*, share_prompts: bool = True, generations: int = 4, budget: int = 8192) -> RunConfig:
    rollout = RolloutConfig(
        max_prompt_length=32, max_completion_length=128, num_generations=generations
    )
    algorithm = AlgorithmConfig(
        mini_batch_size=4, share_prompts=share_prompts, tokens_per_micro_batch=budget
    )
    return RunConfig(rollout=rollout, algorithm=algorithm)


def test_a_row_is_as_long_as_a_group_where_the_budget_has_room():
    """31 + 4 x (1 + 128) tokens."""
    assert micro_shapes(config().micro_batches, 1, "cpu") == [(1, 552), (2, 552), (4, 552)]
    assert micro_shapes(config().micro_batches, 4, "cpu")[-1] == (4, 552)
    assert micro_shapes(config(budget=1000).micro_batches, 2, "cpu")[-1] == (
        2,
        496,
    )  # three of four
    assert micro_shapes(config(budget=160).micro_batches, 1, "cpu") == micro_shapes(
        config(budget=160, share_prompts=False).micro_batches, 1, "cpu"
    )


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("generations", [2, 4, 64])
@pytest.mark.parametrize("budget", [160, 1152, 8192])
def test_sharing_compiles_no_more_shapes(shards: int, generations: int, budget: int):
    with_it, without = (
        micro_shapes(
            config(share_prompts=is_shared, generations=generations, budget=budget).micro_batches,
            shards,
            "cpu",
        )
        for is_shared in (True, False)
    )
    assert len(with_it) <= len(without)
    most = max(budget, shards * without[-1][1])
    assert all(rows * length <= most and rows % shards == 0 for rows, length in with_it)
    assert with_it[-1][1] >= without[-1][1]


def test_a_supervised_stage_has_rows_for_its_batch():
    asked = replace(config(), warm_start=replace(config().warm_start, steps=1, batch_size=64))
    assert micro_shapes(asked.micro_batches, 1, "cpu")[-1] == (14, 552)  # all that the budget holds


@pytest.mark.parametrize(
    ("platform", "is_known"), [("cpu", True), ("gpu", True), ("cuda", True), ("tpu", False)]
)
def test_prompts_are_shared_where_the_kernel_knows_branches(platform: str, is_known: bool):
    assert knows_branches(platform) is is_known
    assert shares_prompts(config().micro_batches, platform) is is_known
    assert not shares_prompts(config(share_prompts=False).micro_batches, platform)
    apart = micro_shapes(config(share_prompts=False).micro_batches, 1, platform)
    assert (micro_shapes(config().micro_batches, 1, platform) == apart) is not is_known
