"""Collects what an iteration learns from: prompts, responses and their rewards.

Knows batches of prompts, rollouts and rewards. Does not know advantages or updates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.algorithm.advantages import has_signal
from pat_jax.rl.batches.types import Rollout, RolloutGroup
from pat_jax.rl.rewards.by_function import ScoresByFunction
from pat_jax.rl.rewards.outcome import Failure
from pat_jax.rl.rewards.report import describe_rewards
from pat_jax.rl.rewards.responses import response_reader
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.rl.rewards.weighted_sum import FunctionScores, joined
from pat_jax.run.checkpoints.journal import Iteration, RolloutJournal
from pat_jax.run.checkpoints.skipped_steps import MOST_IN_A_ROW
from pat_jax.run.early_columns import Columns, EarlyColumns
from pat_jax.run.generation import Generator
from pat_jax.run.logging.completions import Completions
from pat_jax.run.logging.progress import Progress
from pat_jax.run.logging.rollout_metrics import describe_rollouts
from pat_jax.run.logging.speed import sequence_lengths
from pat_jax.run.own_reads import OwnReads
from pat_jax.run.scoring import FailedRollouts, wait_for_rewards
from pat_jax.run.start.task import Task
from pat_jax.run.start.totals import Totals

History = tuple[Totals, LengthModel]  # what all iterations so far drew, and how long it was
Reads = EarlyColumns | OwnReads  # of one batch


@dataclass(frozen=True)
class Drawn:
    """One batch of prompts with its responses, scored."""

    groups: Sequence[RolloutGroup]
    report: RolloutReport
    rewards: Float[np.ndarray, "groups samples"]  # NaN: the response has none
    failures: Mapping[int, Failure]  # by response, one group after the other
    scores: Sequence[FunctionScores]  # of each reward function
    hidden_seconds: float  # of scoring while the rollout was running
    from_disk: int = 0  # responses that were generated before the run was killed
    reads: Reads | None = None  # None: models read when they learn

    @property
    def columns(self) -> Columns:
        """Columns of the responses that are known already."""
        return self.reads.columns if self.reads else {}

    @property
    def by_function(self) -> ScoresByFunction:
        return ScoresByFunction.of(self.scores, self.rewards)

    def trace(self, capacity: int) -> RolloutTrace:
        """Returns the rollout's trace, with the lengths of its sequences for a replay. They are
        left out if some responses came from disk, as their path is not known. `capacity` is how
        many sequences the engine can run at once."""
        if self.from_disk:
            return self.report.trace
        rollouts = [one for group in self.groups for one in group.rollouts]
        columns = [[len(x.prompt.tokens), len(x.tokens), x.prompt.id] for x in rollouts]
        if (expected := self.report.expected) is not None:
            columns = np.column_stack([columns, expected.round(1)]).tolist()
        sequences = tuple(map(tuple, columns))
        return replace(self.report.trace, sequences=sequences, capacity=capacity)


@dataclass(frozen=True)
class Experience:
    groups: Sequence[RolloutGroup]
    rewards: Float[np.ndarray, "groups samples"]
    by_function: ScoresByFunction
    last: Drawn  # the batch that completed it
    drawn: Sequence[RolloutGroup]  # of all batches, groups without signal included
    columns: Columns  # of the responses of `groups`, those that are known already
    history: History  # with this iteration
    measured: dict[str, Any]


class Collector:
    """Draws batches of prompts, and has their responses generated and scored.

    Dynamic sampling leaves out groups without signal, whose rewards are all equal. It replaces them
    from at most `num_redraws` further batches. If too few groups are found, the iteration
    learns from these; if none is found, it learns from the whole last batch.

    Reference: Yu et al. 2025, https://arxiv.org/abs/2503.14476, section 3.2.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        task: Task,
        scorer: RewardScorer,
        completions: Completions,
        progress: Progress,
        unfinished: RolloutJournal,
        totals: Totals,
        reads: Callable[[], Reads] | None = None,
        *,
        num_redraws: int = 0,
        by_function: bool = False,
    ):
        """
        Args:
          totals: of what earlier iterations drew.
          reads: returns what models read of a batch before they learn from it; None: nothing.
          num_redraws: the most further batches of an iteration (`dynamic_sampling`).
          by_function: whether each function's scores are compared by themselves.
        """
        self.unfinished = unfinished
        self._rollout, self._task, self._scorer = rollout, task, scorer
        self._num_redraws, self._by_function = num_redraws, by_function
        self._read = response_reader(task.columns, task.tokenizer)
        self._completions, self._progress = completions, progress
        self.totals, self._reads = totals, reads
        self._failed = FailedRollouts(MOST_IN_A_ROW)

    def collect(self, step: int, generator: Generator, clock: Stopwatch) -> Experience:
        """Returns the groups of iteration `step` with their rewards. Raises UserError if the reward
        function cannot work, or if a response could not be sampled."""
        wanted, size = self._rollout.prompts_per_step, self._rollout.num_generations
        more = self._num_redraws
        drawn, groups, rewards, scores, columns = [], [], [], [], []
        with self.unfinished.iteration(step, generator.policy) as kept:
            while len(groups) < wanted and len(drawn) <= more:
                drawn.append(one := self._draw(step, generator, clock, kept))
                keeps = self._teaches(one) if more else np.full(len(one.groups), True)
                pairs = zip(one.groups, keeps, strict=True)
                groups += [group for group, keep in pairs if keep]
                rewards.append(one.rewards[keeps])
                scores.append(one.by_function.of_groups(keeps))
                columns.append(_of_groups(one.columns, keeps, size))
        last = drawn[-1]
        epochs = self._task.train.epochs(self.totals.cursor)
        measured = _describe(drawn) | self.totals.metrics(epochs)
        history = self.totals, generator.lengths
        every = [group for one in drawn for group in one.groups]
        if not groups:
            made_of = last.groups, last.rewards, last.by_function
            return Experience(*made_of, last, every, last.columns, history, measured)
        first = slice(wanted)
        rewards, by_function = np.concatenate(rewards)[first], ScoresByFunction.joined(scores)
        made_of = groups[first], rewards, by_function.of_groups(first)
        known = {
            name: [x for part in columns for x in part[name]][: wanted * size]
            for name in columns[0]
        }
        return Experience(*made_of, last, every, known, history, measured)

    def _teaches(self, drawn: Drawn) -> Bool[np.ndarray, " groups"]:
        """Whether the algorithm finds a difference between the responses of a group."""
        if self._by_function:
            return drawn.by_function.has_signal
        return has_signal(drawn.rewards)

    def _draw(
        self, step: int, generator: Generator, clock: Stopwatch, iteration: Iteration
    ) -> Drawn:
        number, rollout = self.totals.batches, self._rollout
        prompts, after = self._task.train.draw(self.totals.cursor, rollout.prompts_per_step)
        texts = [prompt.text for prompt in prompts for _ in range(rollout.num_generations)]
        kept = iteration.batch(number)
        reads = self._reads() if self._reads else None
        scoring = self._scorer.begin(texts, self._read, kept)

        def on_finish(index: int, ended: Rollout) -> None:
            if reads:
                reads.add(index, ended)
            scoring.add(index, ended)

        with clock("rollout"):  # finished responses are scored and read meanwhile
            groups, report = generator.rollout(prompts, number, on_finish, kept)
        responses = [one for group in groups for one in group.rollouts]
        with clock("reward"), self._completions.kept(step + 1, "train", responses):
            if reads:
                reads.ask()
            rewards = wait_for_rewards(scoring, self._progress, self._failed)
            if reads:
                reads.wait(len(responses))
        kept.keep_all(scoring.scores)
        if kept.taken:
            self._progress.print(
                f"{kept.taken} of {len(responses)} responses were on disk from before, and were not drawn again"
            )
        self._completions.write(step + 1, "train", responses, rewards, scoring.scores)
        self.totals = self.totals.plus(int(sequence_lengths(groups).sum()), after)
        by_group = rewards.reshape(len(groups), -1)
        failures, scores = scoring.failures, scoring.scores
        hidden = scoring.hidden_seconds
        return Drawn(groups, report, by_group, failures, scores, hidden, kept.taken, reads)


def _of_groups(columns: Columns, keeps: np.ndarray, size: int) -> Columns:
    """Returns the columns of the groups that are kept, of `size` responses each."""
    return {
        name: [x for i, x in enumerate(values) if keeps[i // size]]
        for name, values in columns.items()
    }


def _describe(drawn: Sequence[Drawn]) -> dict[str, Any]:
    """Returns the metrics of all batches together, but those of the rollout only of the last."""
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
    if early := [x for one in drawn if isinstance(x := one.reads, EarlyColumns)]:
        measured["reward/early_seconds"] = sum(one.busy_seconds for one in early)
        measured["reward/early_waited_seconds"] = sum(one.waited_seconds for one in early)
    return measured
