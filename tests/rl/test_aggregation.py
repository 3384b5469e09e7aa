"""What a loss averages over, against the papers' formulas in float64, masks included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.rl.algorithm.aggregation import Aggregation
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.batches.batches import to_train_batch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup

STOP, CUT = FinishReason.STOP, FinishReason.LENGTH
LONGEST = 6
# Of two prompts: tokens of each response, and how it ended.
RESPONSES = [[(2, STOP), (6, CUT), (3, STOP)], [(6, CUT), (1, STOP), (4, STOP)]]
ADVANTAGES = np.array([[1.0, -0.5, 2.0], [0.25, -1.5, 0.75]], np.float32)


def groups(rng: np.random.Generator) -> list[RolloutGroup]:
    made = []
    for number, responses in enumerate(RESPONSES):
        prompt = Prompt(number, (1, 2), "", {})
        rollouts = [
            Rollout(prompt, i, np.arange(n, dtype=np.int32), -rng.random(n, np.float32), finish)
            for i, (n, finish) in enumerate(responses)
        ]
        made.append(RolloutGroup(prompt, rollouts))
    return made


def expected(aggregation: str, truncated: str, terms: list[tuple[np.ndarray, bool]]) -> float:
    """Of the terms of each token, min(ratio · A, clipped · A), response by response."""
    kept = [term for term, is_cut in terms if truncated == "score" or not is_cut]
    if aggregation == "token":  # DAPO, eq. 8
        return -np.concatenate(kept).sum() / sum(map(len, kept))
    if aggregation == "sequence":  # GRPO, eq. 3
        return -float(np.mean([term.mean() for term in kept]))
    return -sum(term.sum() for term in kept) / LONGEST / len(terms)  # Dr. GRPO, section 3.2


@pytest.mark.parametrize("truncated", ["mask", "score"])
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("budget", [2, 6])  # rows of a micro-batch
def test_the_loss_is_the_papers_and_the_metrics_are_means(
    aggregation: Aggregation, truncated, budget
):
    rng = np.random.default_rng(3)
    batch = to_train_batch(
        groups(rng),
        ADVANTAGES,
        mini_batch_size=2,
        micro_shapes=[(budget, 8)],
        aggregation=aggregation,
        truncated=truncated,
        max_completion_length=LONGEST,
    )
    (mini,) = batch.mini_batches
    loss, terms, gaps = PolicyLoss(), {}, []
    sums = loss.zero_sums()
    for micro in mini:
        new = -rng.random(micro.tokens.shape, np.float32)
        old = (new + rng.normal(0, 0.3, new.shape)).astype(np.float32)
        new32, weights = jnp.asarray(new), jnp.asarray(micro.weights)
        columns = jax.tree.map(jnp.asarray, micro.columns | {"old_logprobs": old})
        sums = loss.add(sums, loss(new32, jnp.zeros_like(new32), columns, weights)[1])
        advantages = micro.columns["advantages"].astype(np.float64)
        for row, in_row in enumerate(micro.responses):
            for number in range(1, in_row.max() + 1):
                at = in_row == number
                (advantage,) = set(advantages[row, at])  # one for the whole response
                ratio = np.exp(new[row, at].astype(np.float64) - old[row, at])
                term = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
                terms[float(advantage)] = term
                if micro.weights[row, at].any():
                    gap = np.abs(old[row, at] - micro.columns["behavior_logprobs"][row, at])
                    gaps.append((gap, 1.0 if aggregation != "sequence" else 1 / len(gap)))
    flat = [finish is CUT for responses in RESPONSES for _, finish in responses]
    in_order = [(terms[float(a)], cut) for a, cut in zip(ADVANTAGES.flat, flat, strict=True)]
    metrics = loss.summary([jax.device_get(sums)])
    assert metrics["loss"] == pytest.approx(expected(aggregation, truncated, in_order), rel=1e-5)
    mean_gap = sum(gap.sum() * w for gap, w in gaps) / sum(len(gap) * w for gap, w in gaps)
    assert metrics["behavior_gap"] == pytest.approx(mean_gap, rel=1e-5)


def test_the_constant_needs_to_be_given():
    with pytest.raises(ValueError, match="'constant' needs max_completion_length"):
        to_train_batch(
            groups(np.random.default_rng(0)),
            ADVANTAGES,
            mini_batch_size=2,
            micro_shapes=[(2, 8)],
            aggregation="constant",
            truncated="score",
        )
