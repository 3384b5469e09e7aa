"""What shares a prompt in a row sees that and itself; and the rows that a run has for it."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.run import RunConfig
from pat_jax.models.kernels.row_attention import attend_rows, knows_branches
from pat_jax.rl.batches.batches import to_train_batch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.training.build import micro_shapes, shares_prompts

ROWS, LENGTH, KV, GROUP, DIM = 2, 64, 1, 2, 4
TOKENS = 400
GROUPS = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 12), min_size=4, max_size=4)),
    min_size=1,
    max_size=5,
)


def groups_of(lengths) -> list[RolloutGroup]:
    """No token occurs twice but those of a prompt."""
    token, groups = 1, []
    for number, (size, responses) in enumerate(lengths):
        prompt = Prompt(number, tuple(range(token, token + size)), "", {})
        token, rollouts = token + size, []
        for i, n in enumerate(responses):
            tokens, zeros = np.arange(token, token + n, dtype=np.int32), np.zeros(n, np.float32)
            rollouts.append(Rollout(prompt, i, tokens, zeros, FinishReason.STOP, zeros))
            token += n
        groups.append(RolloutGroup(prompt, rollouts))
    return groups


def dense(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Causal attention of one sequence in float64: [length, kv_heads, queries_per_kv, head_dim]."""
    scores = np.einsum("tkgd,skd->kgts", queries, keys) / np.sqrt(DIM)
    scores = np.where(np.tri(len(queries)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("kgts,skd->tkgd", weights / weights.sum(-1, keepdims=True), values)


attend = jax.jit(attend_rows)


@settings(max_examples=30)
@given(GROUPS)
def test_each_response_sees_its_prompt_and_itself(lengths):
    """Queries, keys and values are those of tokens: attention is that of prompt and response alone."""
    groups, rng = groups_of(lengths), np.random.default_rng(0)
    of_query = rng.normal(size=(TOKENS, KV, GROUP, DIM))
    of_key, of_value = rng.normal(size=(2, TOKENS, KV, DIM))
    batch = to_train_batch(
        groups,
        np.ones((len(groups), 4)),
        mini_batch_size=len(groups),
        micro_shapes=[(ROWS, LENGTH)],
        aggregation="token",
        truncated="score",
        shares_prompts=True,
    )
    (mini,) = batch.mini_batches
    attended = [
        attend(
            of_query[micro.tokens].astype(np.float32),
            *(np.moveaxis(x[micro.tokens], 2, 1).astype(np.float32) for x in (of_key, of_value)),
            micro.positions,
        )
        for micro in mini
    ]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, at in zip(rollouts, batch.places, strict=True):
        whole = np.array([*rollout.prompt.tokens, *rollout.tokens])
        wanted = dense(of_query[whole], of_key[whole], of_value[whole])
        own = slice(len(rollout.prompt.tokens) - 1, len(whole) - 1)
        found = np.asarray(attended[at.micro][at.row, at.targets])
        np.testing.assert_allclose(found, wanted[own], rtol=1e-5, atol=1e-5)
    written = sum(int((micro.tokens > 0).sum()) for micro in mini)
    sizes = sum(len(r.prompt.tokens) + len(r.tokens) for r in rollouts)
    assert written == sizes - batch.shared.sum()


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
    assert micro_shapes(config(), 1, "cpu") == [(1, 552), (2, 552), (4, 552)]
    assert micro_shapes(config(), 4, "cpu")[-1] == (4, 552)
    assert micro_shapes(config(budget=1000), 2, "cpu")[-1] == (2, 496)  # three of four
    assert micro_shapes(config(budget=160), 1, "cpu") == micro_shapes(
        config(budget=160, share_prompts=False), 1, "cpu"
    )


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("generations", [2, 4, 64])
@pytest.mark.parametrize("budget", [160, 1152, 8192])
def test_sharing_compiles_no_more_shapes(shards: int, generations: int, budget: int):
    with_it, without = (
        micro_shapes(
            config(share_prompts=is_shared, generations=generations, budget=budget), shards, "cpu"
        )
        for is_shared in (True, False)
    )
    assert len(with_it) <= len(without)
    most = max(budget, shards * without[-1][1])
    assert all(rows * length <= most and rows % shards == 0 for rows, length in with_it)
    assert with_it[-1][1] >= without[-1][1]


def test_a_supervised_stage_has_rows_for_its_batch():
    asked = replace(config(), warm_start=replace(config().warm_start, steps=1, batch_size=64))
    assert micro_shapes(asked, 1, "cpu")[-1] == (14, 552)  # all that the budget holds


@pytest.mark.parametrize(
    ("platform", "is_known"), [("cpu", True), ("gpu", True), ("cuda", True), ("tpu", False)]
)
def test_prompts_are_shared_where_the_kernel_knows_branches(platform: str, is_known: bool):
    assert knows_branches(platform) is is_known
    assert shares_prompts(config(), platform) is is_known
    assert not shares_prompts(config(share_prompts=False), platform)
    apart = micro_shapes(config(share_prompts=False), 1, platform)
    assert (micro_shapes(config(), 1, platform) == apart) is not is_known
