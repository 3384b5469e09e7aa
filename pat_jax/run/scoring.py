"""The rewards of a run: builds its scorer, and reports failures."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from pat_jax.common.devices import num_cores
from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import process_group
from pat_jax.config.rewards import RewardLimits
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.own_code import check_sent
from pat_jax.rl.rewards.outcome import describe_causes
from pat_jax.rl.rewards.report import never_scored
from pat_jax.rl.rewards.responses import trial_responses
from pat_jax.rl.rewards.scorer import RewardScorer, Scoring
from pat_jax.run.checkpoints.skipped_steps import MOST_IN_A_ROW
from pat_jax.run.logging.progress import Progress
from pat_jax.run.roles.reward_models import RewardModels
from pat_jax.run.start.sent_code import REWARDS

RETRIES = 3  # most repetitions of a failed call to an endpoint
TOKEN = "PAT_JAX_REWARD_TOKEN"


def open_scorer(
    rewards: Sequence[str], limits: RewardLimits, models: RewardModels | None = None
) -> RewardScorer:
    """Returns a scorer for the task's `rewards`. Raises UserError if one cannot be imported, or if
    the environment variable `PAT_JAX_REWARD_TOKEN` is invalid."""
    for reward in rewards:
        check_sent("reward", reward, REWARDS)
    return RewardScorer(
        *rewards,
        weights=limits.weights,
        timeout=limits.timeout_s,
        num_workers=limits.workers or num_cores(),
        memory=limits.memory_gib,
        retries=RETRIES,
        token=_token(),
        shares=process_group(),
        models={spec: one.scores for spec, one in (models or {}).items()},
    )


def _token() -> str:
    """Returns the token that is sent to endpoints, or "" if none is set."""
    token = os.environ.get(TOKEN, "")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise UserError(
            f"the environment variable {TOKEN} holds no token: expected ASCII characters without spaces; set "
            "it to what endpoints are to be sent, or unset it."
        )
    return token


def try_out(
    scorer: RewardScorer,
    prompt: Prompt,
    columns: Sequence[str],
    num_generations: int,
    progress: Progress,
) -> None:
    """Calls the reward functions on trial responses, before anything is compiled. Raises UserError
    if one cannot work."""
    progress.stage("trying out the reward")
    for note in scorer.try_out(trial_responses(prompt, columns), num_generations):
        progress.print(note)


@dataclass
class FailedRollouts:
    """Counts successive rollouts without any reward; more than `most` of them end the run."""

    most: int = MOST_IN_A_ROW
    _in_a_row: int = 0

    def note(self, scoring: Scoring[Any]) -> None:
        has_failed = 0 < len(scoring.failures) == len(scoring.scores[0].scores)
        self._in_a_row = self._in_a_row + 1 if has_failed else 0
        if self._in_a_row > self.most:
            raise UserError(
                f"{self._in_a_row} rollouts in a row failed, more than {self.most}: "
                f"{never_scored(scoring.scores, scoring.failures)}"
            )


def wait_for_rewards(
    scoring: Scoring[Any], progress: Progress, failed: FailedRollouts
) -> Float[np.ndarray, " responses"]:
    """Waits for all rewards and returns them: NaN for a response that could not be scored, which
    is also reported. Raises UserError if a reward function cannot work (`FailedRollouts`)."""
    progress.stage("waiting for rewards")
    rewards = scoring.rewards()
    failures = scoring.failures.values()
    failed.note(scoring)
    if failures:
        progress.print(
            f"{len(failures)} of {len(rewards)} responses could not be scored and are left out "
            f"({describe_causes(failures)}): see run.log"
        )
    return rewards
