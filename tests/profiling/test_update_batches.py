"""The micro-batches that a plan counts are those that a trainer would make."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.profiling.capacity.role_passes import Packed
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.rl.batches.batches import to_train_batch
from pat_jax.rl.batches.packing import shapes
from pat_jax.rl.batches.train_batch import MicroBatch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup

SHAPES = shapes((16, 32, 64), 512, 4)


def seen(micro: MicroBatch, dp: int) -> float:
    """Pairs of a query and a key that it sees, on the device that has most; made of ones, whose padding is
    zeros."""
    pairs = np.where(
        micro.tokens > 0, micro.positions + 1, 0
    )  # of a branch, what it shares included
    return float(pairs.reshape(dp, -1).sum(1).max())


GROUPS = st.lists(
    st.tuples(st.integers(1, 16), st.lists(st.integers(1, 24), min_size=4, max_size=4)),
    min_size=1,
    max_size=8,
)


@given(GROUPS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8]), st.booleans())
def test_as_a_trainer_packs_them(groups, dp: int, prompts: int, shares: bool):
    """With prompts that responses share, and with prompts of their own."""
    drawn = [
        RolloutGroup(prompt, [response_of(prompt, n) for n in responses])
        for number, (size, responses) in enumerate(groups)
        for prompt in [Prompt(number, (1,) * size, "", {})]
    ]
    batch = to_train_batch(
        drawn,
        np.ones((len(groups), 4)),
        mini_batch_size=prompts,
        micro_shapes=SHAPES,
        aggregation="token",
        truncated="score",
        shares_prompts=shares,
    )
    made = [micro for mini in batch.mini_batches for micro in mini]
    work = Workload(
        np.repeat([size for size, _ in groups], 4),
        np.array([n for _, responses in groups for n in responses]),
        48,
        np.repeat(np.arange(len(groups)) + 7, 4),
    )
    packed = Packed.of(work, 4 * prompts, SHAPES, dp, shares_prompts=shares)
    assert packed.slots == sum(micro.tokens.size for micro in made)
    assert packed.shapes == tuple(micro.tokens.shape for micro in made)
    assert packed.pairs == tuple(seen(micro, dp) for micro in made)
    assert packed.shared == tuple(batch.shared)
    unknown = Workload(work.prompts, work.responses, 48)  # of which prompt each is
    apart = Packed.of(work, 4 * prompts, SHAPES, dp)
    assert Packed.of(unknown, 4 * prompts, SHAPES, dp, shares_prompts=True) == apart


def response_of(prompt: Prompt, length: int) -> Rollout:
    zeros = np.zeros(length, np.float32)
    return Rollout(prompt, 0, np.ones(length, np.int32), zeros, FinishReason.STOP, zeros)
