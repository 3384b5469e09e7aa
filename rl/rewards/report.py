"""Reports rewards: the metrics `reward/*`, and why responses could not be scored.

A response without a reward has NaN.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from pat_jax.rl.algorithm.advantages import has_signal
from pat_jax.rl.rewards.outcome import Cause, Failure, count_causes, describe_causes
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.rewards import metric_name
from pat_jax.rl.rewards.weighted_sum import FunctionScores

logger = logging.getLogger(__name__)

_EXCERPT_LENGTH = 200


def log_failures(
    responses: Mapping[int, Response],
    scores: Sequence[FunctionScores],
    failures: Mapping[int, Failure],
) -> None:
    """Logs a line for each failure of a function, with the failure's effect.

    Args:
      responses: the responses at which a function failed.
      failures: for each response without a reward, the reason.
    """
    for row, response in sorted(responses.items()):
        total = failures.get(row)
        effect = "this response is left out" if total else "it has weight 0"
        for who, failure in _failures(row, scores, total):
            logger.warning(
                "%s %s; %s: completion %s, prompt %s",
                who,
                failure.text,
                effect,
                _excerpt(response.completion),
                _excerpt(response.prompt),
            )


def never_scored(scores: Sequence[FunctionScores], failures: Mapping[int, Failure]) -> str:
    """Returns the error message for a run in which no response has ever had a reward."""
    first = min(failures)
    ((who, failure), *_) = _failures(first, scores, failures[first])
    causes = describe_causes(failures.values())
    count = len(scores[0].scores)
    if len(scores) == 1:
        sentence = f"{who} has scored none of {count} responses ({causes}); the first time it"
    else:
        sentence = f"none of {count} responses has a reward ({causes}); the first time {who}"
    if failure.cause is Cause.ENDPOINT:
        return f"{sentence} {failure.text}: expected an endpoint that answers; start it, then the run again."
    if failure.cause is Cause.TOO_LONG:
        return (
            f"{sentence} {failure.text}: expected some that it can read; raise --reward_model.max_length, or "
            "allow shorter prompts and responses."
        )
    return (
        f"{sentence} {failure.text}: expected one finite number a response; correct the function or its "
        "columns."
    )


def _failures(
    row: int, scores: Sequence[FunctionScores], total: Failure | None
) -> list[tuple[str, Failure]]:
    """Returns the names of the rewards that failed at a response, with their failures. A function
    that returned None counts only if no function applies."""
    failed = [(f"reward {one.spec!r}", one.scores[row]) for one in scores]
    found = [(who, score) for who, score in failed if isinstance(score, Failure)]
    if total is None or total.cause is not Cause.NONE:
        found = [(who, failure) for who, failure in found if failure.cause is not Cause.NONE]
    if total is not None and all(failure is not total for _, failure in found):
        found.insert(0, ("the reward", total))  # the sum exceeds float32
    return found


def _excerpt(text: str) -> str:
    if len(text) <= _EXCERPT_LENGTH:
        return repr(text)
    half = _EXCERPT_LENGTH // 2
    return f"{text[:half]!r} … {text[-half:]!r}"


def describe_rewards(
    rewards: Float[np.ndarray, "groups samples"],
    failures: Mapping[int, Failure],
    functions: Sequence[FunctionScores],
) -> dict[str, float | int]:
    """Returns the metrics `reward/*` of the scored responses, and the number of responses without a
    reward."""
    scored = rewards[~np.isnan(rewards)]
    no_signal = {"reward/groups_without_signal": float(np.mean(~has_signal(rewards)))}
    return {
        **_by_function(functions),
        "reward/mean": mean_reward(rewards),
        "reward/std": float(scored.std(dtype=np.float64)) if scored.size else float("nan"),
        **(no_signal if rewards.shape[1] > 1 else {}),  # a single response has no group
        "reward/failed": len(failures),
        **count_causes(failures.values(), "reward/failed"),
    }


def mean_reward(rewards: Float[np.ndarray, "*shape"]) -> float:
    """Returns the mean reward over the scored responses; NaN if there are none."""
    scored = rewards[~np.isnan(rewards)]
    return float(scored.mean(dtype=np.float64)) if scored.size else float("nan")


def _by_function(functions: Sequence[FunctionScores]) -> dict[str, float | int]:
    """Returns metrics of the functions' further numbers and, if there are several, mean scores."""
    found: dict[str, float | int] = {}
    for one in functions:
        prefix = f"reward/{one.name}"
        measured: defaultdict[str, list[float]] = defaultdict(list)
        for numbers in one.numbers:
            for key, number in numbers.items():
                measured[metric_name(key)].append(number)
        found |= {f"{prefix}/{key}": float(np.mean(values)) for key, values in measured.items()}
        if len(functions) > 1:
            found[f"{prefix}/mean"] = mean_reward(one.array)
            found |= count_causes(one.failures, f"{prefix}/failed")
    return found
