"""What a person is told of responses that could not be scored."""

import logging
from collections.abc import Mapping, Sequence

from pat_jax.rl.rewards.outcome import Cause, Failure, describe_causes
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.weighted_sum import FunctionScores

logger = logging.getLogger(__name__)

_EXCERPT_LENGTH = 200


def log_failures(
    responses: Mapping[int, Response],
    scores: Sequence[FunctionScores],
    failures: Mapping[int, Failure],
) -> None:
    """A line for each failure of a function, and what came of it.

    Args:
      failures: why responses have no reward.
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
    """The sentence where no response has a reward, nor had any before."""
    first = min(failures)
    ((who, failure), *_) = _failures(first, scores, failures[first])
    causes = describe_causes(failures.values())
    count = len(scores[0].scores)
    if len(scores) == 1:
        said = f"{who} has scored none of {count} responses ({causes}); the first time it"
    else:
        said = f"none of {count} responses has a reward ({causes}); the first time {who}"
    if failure.cause is Cause.ENDPOINT:
        return f"{said} {failure.text}: expected an endpoint that answers; start it, then the run again."
    return (
        f"{said} {failure.text}: expected one finite number a response; correct the function or its "
        "columns."
    )


def _failures(
    row: int, scores: Sequence[FunctionScores], total: Failure | None
) -> list[tuple[str, Failure]]:
    """Who failed at a response, and how; that functions do not apply counts where none does."""
    failed = [(f"reward {one.spec!r}", one.scores[row]) for one in scores]
    found = [(who, score) for who, score in failed if isinstance(score, Failure)]
    if total is None or total.cause is not Cause.NONE:
        found = [(who, failure) for who, failure in found if failure.cause is not Cause.NONE]
    if total is not None and all(failure is not total for _, failure in found):
        found.insert(0, ("the reward", total))  # of numbers that are too large together
    return found


def _excerpt(text: str) -> str:
    if len(text) <= _EXCERPT_LENGTH:
        return repr(text)
    half = _EXCERPT_LENGTH // 2
    return f"{text[:half]!r} … {text[-half:]!r}"
