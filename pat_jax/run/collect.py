"""Collects what an iteration learns from: prompts, responses and their rewards.

Knows batches of prompts, rollouts and rewards. Does not know advantages or updates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.record.report import RolloutReport
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.algorithm.advantages import has_signal
from pat_jax.rl.batches.types import Rollout, RolloutGroup
from pat_jax.rl.rewards.outcome import Failure
from pat_jax.rl.rewards.report import describe_rewards
from pat_jax.rl.rewards.responses import response_reader
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.rl.rewards.weighted_sum import FunctionScores, ScoresByFunction, joined
from pat_jax.run.checkpoints.journal import Iteration, RolloutJournal
from pat_jax.run.generation import Generator
from pat_jax.run.logging.completions import Completions
from pat_jax.run.logging.progress import Progress
from pat_jax.run.logging.rollout_metrics import describe_rollouts
from pat_jax.run.logging.speed import sequence_lengths
from pat_jax.run.reads import Columns, Reads, ReadsAsTheyEnd
from pat_jax.run.scoring import FailedRollouts, wait_for_rewards
from pat_jax.run.start.task import Task
from pat_jax.run.start.totals import Totals

History = tuple[Totals, LengthModel]  # counts of drawn batches and response lengths, so far


@dataclass(frozen=True)
class ScoredGroups:
    """Groups of responses, with the reward, the scores and the columns of each response."""

    groups: Sequence[RolloutGroup]
    rewards: Float[np.ndarray, "groups samples"]  # NaN: the response has no reward
    by_function: ScoresByFunction
    columns: Columns  # log-probabilities and values that models have predicted already

    @property
    def lengths(self) -> Int[np.ndarray, "groups samples"]:
        """The number of tokens of each response."""
        return np.array([[len(one.tokens) for one in group.rollouts] for group in self.groups])

    def of(self, chosen: Bool[np.ndarray, " groups"] | slice) -> "ScoredGroups":
        """Returns the groups at the chosen indices."""
        responses = np.arange(self.rewards.size).reshape(self.rewards.shape)[chosen]
        return ScoredGroups(
            [self.groups[i] for i in np.arange(len(self.groups))[chosen].tolist()],
            self.rewards[chosen],
            self.by_function.of_groups(chosen),
            {
                name: [each[i] for i in responses.ravel().tolist()]
                for name, each in self.columns.items()
            },
        )

    @classmethod
    def joined(cls, parts: Sequence["ScoredGroups"]) -> "ScoredGroups":
        """Returns the groups of several batches, one after the other."""
        return cls(
            [group for part in parts for group in part.groups],
            np.concatenate([part.rewards for part in parts]),
            ScoresByFunction.joined([part.by_function for part in parts]),
            {name: [x for part in parts for x in part.columns[name]] for name in parts[0].columns},
        )


@dataclass(frozen=True)
class Drawn:
    """One batch of prompts, with the responses and their rewards."""

    groups: Sequence[RolloutGroup]
    report: RolloutReport
    rewards: Float[np.ndarray, "groups samples"]  # NaN: the response has no reward
    failures: Mapping[int, Failure]  # failed scorings by the response's index over all groups
    scores: Sequence[FunctionScores]  # one entry for each reward function
    hidden_seconds: float  # seconds of scoring during the rollout
    from_disk: int = 0  # responses on disk, generated before the run was killed
    reads: Reads = field(default_factory=ReadsAsTheyEnd)

    @property
    def scored(self) -> ScoredGroups:
        by_function = ScoresByFunction.of(self.scores, self.rewards)
        return ScoredGroups(self.groups, self.rewards, by_function, self.reads.columns)


@dataclass(frozen=True)
class Experience:
    """The groups that an iteration learns from, and all batches drawn for them."""

    step: int  # number of the iteration, from 1
    scored: ScoredGroups
    drawn: Sequence[Drawn]  # all batches, groups without signal included
    history: History  # of all iterations up to this one, included
    measured: dict[str, Any]


@dataclass
class Collector:
    """Draws batches of prompts, and has their responses generated and scored.

    Dynamic sampling leaves out groups without signal, whose rewards are all equal. It replaces them
    from at most `num_redraws` further batches. If too few groups with signal are found, the
    iteration learns from those found; if none is found, it learns from the whole last batch.

    Reference: Yu et al. 2025, https://arxiv.org/abs/2503.14476, section 3.2.

    Attributes:
      totals: counts of what earlier iterations drew.
      reads: called for each batch; returns the object that gets its predictions by models.
      num_redraws: most batches that an iteration may draw after the first (`dynamic_sampling`).
      by_function: whether each reward function's scores are compared separately (GDPO).
    """

    rollout: RolloutConfig
    task: Task
    scorer: RewardScorer
    completions: Completions
    progress: Progress
    unfinished: RolloutJournal
    totals: Totals
    reads: Callable[[], Reads] = ReadsAsTheyEnd
    num_redraws: int = 0
    by_function: bool = False
    _failed: FailedRollouts = field(default_factory=FailedRollouts)

    def collect(self, step: int, generator: Generator, clock: Stopwatch) -> Experience:
        """Generates and scores what the iteration after `step` others learns from. Raises UserError
        if the reward function cannot work, or if a response could not be sampled."""
        drawn = list[Drawn]()
        parts = list[ScoredGroups]()
        wanted = self.rollout.prompts_per_step
        with self.unfinished.iteration(step, generator.policy) as kept:
            while sum(len(x.groups) for x in parts) < wanted and len(drawn) <= self.num_redraws:
                drawn.append(one := self._draw(step, generator, clock, kept))
                parts.append(one.scored.of(self._teaches(one.scored)))
        scored = ScoredGroups.joined(parts).of(slice(wanted))
        epochs = self.task.train.epochs(self.totals.cursor)
        return Experience(
            step + 1,
            scored if scored.groups else drawn[-1].scored,
            drawn,
            (self.totals, generator.lengths),
            _describe(drawn) | self.totals.metrics(epochs),
        )

    def _teaches(self, drawn: ScoredGroups) -> Bool[np.ndarray, " groups"] | slice:
        """Selects the groups with signal for the algorithm; all groups without dynamic sampling."""
        if not self.num_redraws:
            return slice(None)
        if self.by_function:
            return drawn.by_function.has_signal
        return has_signal(drawn.rewards)

    def _draw(
        self, step: int, generator: Generator, clock: Stopwatch, iteration: Iteration
    ) -> Drawn:
        number = self.totals.batches
        rollout = self.rollout
        prompts, after = self.task.train.draw(self.totals.cursor, rollout.prompts_per_step)
        texts = [prompt.text for prompt in prompts for _ in range(rollout.num_generations)]
        kept = iteration.batch(number)
        reads = self.reads()
        read = response_reader(self.task.columns, self.task.tokenizer)
        scoring = self.scorer.begin(texts, read, kept)

        def on_finish(index: int, ended: Rollout) -> None:
            reads.add(index, ended)
            scoring.add(index, ended)

        with clock("rollout"):  # finished responses are scored meanwhile
            groups, report = generator.rollout(prompts, number, on_finish, kept)
        responses = [one for group in groups for one in group.rollouts]
        with clock("reward"), self.completions.kept(step + 1, "train", responses):
            reads.ask(responses)
            rewards = wait_for_rewards(scoring, self.progress, self._failed)
            reads.wait()
        kept.keep_all(scoring.scores)
        if kept.taken:
            self.progress.print(
                f"{kept.taken} of {len(responses)} responses were on disk from before, and were not drawn again"
            )
        self.completions.write(step + 1, "train", responses, rewards, scoring.scores)
        self.totals = self.totals.plus(int(sequence_lengths(groups).sum()), after)
        return Drawn(
            groups,
            report,
            rewards.reshape(len(groups), -1),
            scoring.failures,
            scoring.scores,
            scoring.hidden_seconds,
            kept.taken,
            reads,
        )


def _describe(drawn: Sequence[Drawn]) -> dict[str, Any]:
    """Returns metrics of all drawn batches; the engine's metrics are of the last batch alone."""
    rewards = np.concatenate([one.rewards for one in drawn])
    failures = [failure for one in drawn for failure in one.failures.values()]
    groups = [group for one in drawn for group in one.groups]
    scores = [joined(parts) for parts in zip(*(one.scores for one in drawn), strict=True)]
    measured: dict[str, Any] = {**describe_rewards(rewards, dict(enumerate(failures)), scores)}
    measured |= describe_rollouts(groups, drawn[-1].report)
    measured["rollout/tokens"] = sum(one.report.tokens for one in drawn)
    measured["rollout/batches"] = len(drawn)
    measured["rollout/from_disk"] = sum(one.from_disk for one in drawn)
    measured["reward/hidden_seconds"] = sum(one.hidden_seconds for one in drawn)
    for name in drawn[0].reads.metrics:
        measured[name] = sum(one.reads.metrics[name] for one in drawn)
    return measured
