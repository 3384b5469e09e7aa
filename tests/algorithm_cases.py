"""Made-up responses with their log-probabilities, as a run's batch and as a paper's formula has them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.rl.rewards.weighted_sum import ScoresByFunction
from pat_jax.run.collect import ScoredGroups
from pat_jax.run.learning import training_batch
from pat_jax.training.build import policy_loss

GROUPS, SAMPLES, LONGEST, BETA = 3, 4, 10, 0.05
# GSPO's clips are of a thousandth: its ratios have to lie on both sides of them.
SPREAD = {"gspo": 1e-3, "rloo": 0.1}


class Response(NamedTuple):
    """Of one response, float64[tokens] but for the reward: what a paper's formula speaks of."""

    reward: float
    new: np.ndarray
    old: np.ndarray
    reference: np.ndarray  # the teacher of a distillation has the same numbers


def drawn(seed: int, spread: float) -> list[list[Response]]:
    """`spread`: of the log-ratios."""
    rng = np.random.default_rng(seed)

    def response() -> Response:
        old = -rng.exponential(1.5, rng.integers(1, LONGEST + 1))
        new, reference = (old + rng.normal(0, s, len(old)) for s in (spread, 0.5))
        return Response(float(np.float32(rng.random())), new, old, reference)

    return [[response() for _ in range(SAMPLES)] for _ in range(GROUPS)]


def flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [one for group in groups for one in group]


def batch_of(
    name: str, groups: list[list[Response]], **parts: Any
) -> tuple[AlgorithmConfig, TrainBatch]:
    """As a run makes it, with the columns that its trainer would compute.

    Args:
      parts: options that are not as the name says.
    """
    algorithm = AlgorithmConfig(
        name=name,  # pyright: ignore[reportArgumentType]
        mini_batch_size=GROUPS,
        tokens_per_micro_batch=64,
        **{**ALGORITHMS[name], "beta": BETA, **parts},
    )
    made = list[RolloutGroup]()
    for number, group in enumerate(groups):
        prompt = Prompt(number, (1, 2), "", {})
        rollouts = [
            Rollout(
                prompt,
                i,
                np.arange(len(x.new), dtype=np.int32),
                x.old.astype(np.float32),
                FinishReason.STOP,
            )
            for i, x in enumerate(group)
        ]
        made.append(RolloutGroup(prompt, rollouts))
    everyone = flat(groups)

    def read(batch: TrainBatch) -> TrainBatch:
        batch = batch.with_column("old_logprobs", [x.old for x in everyone])
        for name in ("reference", "teacher"):
            batch = batch.with_column(f"{name}_logprobs", [x.reference for x in everyone])
        return batch.with_column("old_values", [values_of(x) for x in everyone])

    rewards = np.array([[x.reward for x in group] for group in groups])
    batch, measured = training_batch(
        algorithm,
        ScoredGroups(made, rewards, ScoresByFunction(rewards[None], (1.0,)), {}),
        rewards,
        read,
        beta=algorithm.beta,
        micro_shapes=[(4, 16)],
        longest=LONGEST,
    )
    assert measured["train/advantage_std"] > 0
    return algorithm, batch


def values_of(response: Response) -> np.ndarray:
    """A critic's opinion of each token, made up."""
    return np.cos(3 * response.old)


def ours(
    name: str,
    groups: list[list[Response]],
    columns: Mapping[str, Sequence[np.ndarray]] | None = None,
    **parts: Any,
) -> tuple[float, list[np.ndarray]]:
    """The loss, and its gradient with respect to each response's log-probabilities.

    Args:
      columns: that are not as in `batch_of`, by response.
    """
    algorithm, batch = batch_of(name, groups, **parts)
    for column, values in (columns or {}).items():
        batch = batch.with_column(column, values)
    batch = batch.with_column("new", [x.new for x in flat(groups)])
    loss, total, (mini,) = policy_loss(algorithm, is_on_policy=False), 0.0, batch.mini_batches
    assert len(mini) > 1
    filled = []
    for micro in mini:
        read = jax.tree.map(jnp.asarray, micro.columns)
        weights, responses = jnp.asarray(micro.weights), jnp.asarray(micro.responses)

        def of_micro(new, read=read, weights=weights, responses=responses):
            predicted = {LOGPROBS: new, ENTROPY: jnp.zeros_like(new)}
            return loss(predicted, read, weights, responses)

        (value, _), gradient = jax.value_and_grad(of_micro, has_aux=True)(read["new"])
        total += float(value)
        filled.append(np.asarray(gradient))
    gradients = [filled[at.micro][at.row, at.targets] for at in batch.places]
    return total, gradients
