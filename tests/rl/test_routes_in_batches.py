"""The experts of a rollout's tokens are those of the same tokens in a batch, wherever they lie."""

from itertools import count

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.rl.batches.batches import to_supervised_batch, to_train_batch
from pat_jax.rl.batches.packing import shapes
from pat_jax.rl.batches.train_batch import NOT_RECORDED
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup

LAYERS, K = 2, 3
SHAPES = shapes((12, 24, 48), budget=2 * 48, row_multiple=1)
# Of each group the tokens of its prompt and of each response, and whether their routes are recorded.
GROUPS = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 9, 20]),
        st.lists(st.integers(1, 12), min_size=3, max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


def routes_of(tokens: np.ndarray) -> np.ndarray:
    """Made up from each token, which occurs nowhere else; int16[tokens, layers, k]."""
    every = LAYERS * K * np.asarray(tokens)[:, None] + np.arange(LAYERS * K)
    return every.reshape(-1, LAYERS, K).astype(np.int16)


@given(GROUPS, st.booleans(), st.integers(1, 4))
def test_routes_lie_where_their_tokens_lie(lengths, shares_prompts: bool, mini_batch_size: int):
    token, groups = count(1), list[RolloutGroup]()
    without: set[int] = set()  # tokens of no recorded experts
    for number, (prompt_length, responses, is_known) in enumerate(lengths):
        prompt = Prompt(number, tuple(next(token) for _ in range(prompt_length)), "", {})
        rollouts = []
        for sample, length in enumerate(responses):
            tokens = np.array([next(token) for _ in range(length)], np.int32)
            whole = np.concatenate([prompt.tokens, tokens])
            routes = routes_of(whole[:-1]) if is_known else None
            without |= set(tokens.tolist()) if routes is None else {int(tokens[-1])}
            logprobs = np.zeros(length, np.float32)
            done = FinishReason.STOP
            rollouts.append(Rollout(prompt, sample, tokens, logprobs, done, None, routes))
        without |= set() if is_known else set(prompt.tokens)
        groups.append(RolloutGroup(prompt, rollouts))
    batch = to_train_batch(
        groups,
        np.ones((len(groups), 3), np.float32),
        mini_batch_size=mini_batch_size,
        micro_shapes=SHAPES,
        aggregation="token",
        truncated="score",
        shares_prompts=shares_prompts,
    )
    found: set[int] = set()
    for i, mini in enumerate(batch.mini_batches):
        of_mini = groups[i * mini_batch_size : (i + 1) * mini_batch_size]
        is_known = any(x.routed_experts is not None for g in of_mini for x in g.rollouts)
        for micro in mini:
            assert (micro.routes is not None) == is_known
            if micro.routes is None:
                continue
            assert micro.routes.dtype == np.int16
            assert micro.routes.shape == (*micro.tokens.shape, LAYERS, K)
            is_none = (micro.tokens == 0) | np.isin(micro.tokens, list(without))
            assert (micro.routes[is_none] == NOT_RECORDED).all()
            tokens = micro.tokens[~is_none]
            np.testing.assert_array_equal(micro.routes[~is_none], routes_of(tokens))
            found |= set(tokens.tolist())
    if all(is_known for *_, is_known in lengths):
        assert found == set(range(1, next(token))) - without
    has_shared = any(len(group.prompt.tokens) > 1 for group in groups)
    assert batch.shared.any() <= (shares_prompts and has_shared)


def test_demonstrations_have_no_routes():
    shown = to_supervised_batch([([1, 2], [3, 4, 5])], micro_shapes=[(1, 8)])
    assert all(micro.routes is None for micro in shown)
