"""Evaluates a policy: samples responses to held-out problems, and scores each as soon as it ends.

Training runs and the command `evaluate` share this code. Knows prompts, rewards and the files that
keep them. Does not know the engine (it calls a function that generates) nor what metrics are for.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from pat_jax.config.evaluation import EvalConfig
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from pat_jax.rl.evaluation import Evaluated, describe_evaluation
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.scorer import RewardScorer, Scoring
from pat_jax.rl.text.final_answer import final_answer
from pat_jax.run.generation import EVAL, sampling_request, to_rollout
from pat_jax.run.logging.completions import Completions
from pat_jax.run.logging.progress import Progress
from pat_jax.run.scoring import FailedRollouts, wait_for_rewards
from pat_jax.run.start.heldout import HeldoutSet

SHOWN = 2  # number of responses that a run shows at each evaluation
# A function that generates: yields each request's index and completion, as the request ends.
Ask = Callable[[Sequence[Request]], Iterator[tuple[int, Completion]]]


@dataclass(frozen=True)
class Evaluation:
    total: Evaluated  # results over all problem sets
    parts: Sequence[Evaluated]  # results of each problem set
    seconds: float
    samples: Sequence[str]  # lines that show a few responses

    @property
    def lines(self) -> list[str]:
        """A line about all problems, and if there are several problem sets one about each."""
        several = self.parts if len(self.parts) > 1 else ()
        return [_line(self.total, ""), *(_line(part, f" on {part.name}") for part in several)]

    @property
    def metrics(self) -> dict[str, float | int]:
        return describe_evaluation(self.total, self.parts) | {"eval/seconds": self.seconds}


@dataclass
class Evaluator:
    """Evaluates policies on the same problems every time.

    Attributes:
      read: decodes a rollout to text (`rl.rewards.responses.response_reader`).
      few: how many responses are shown at each evaluation, to the same prompts every time.
    """

    asked: EvalConfig
    sampling: RolloutConfig
    seed: int
    sets: Sequence[HeldoutSet]
    read: Callable[[Rollout], Response]
    scorer: RewardScorer
    completions: Completions
    progress: Progress
    few: int = SHOWN
    _failed: FailedRollouts = field(default_factory=FailedRollouts)

    def evaluate(self, step: int | None, ask: Ask) -> Evaluation:
        """Generates and scores the responses to all problems at once, so that no problem set waits
        for another's tail. `step` counts iterations; it is None outside of a training run. Raises
        UserError if the reward function cannot work, or if a response could not be sampled."""
        start = time.perf_counter()
        size = self.asked.num_generations
        asked = [
            (number, prompt, sample)
            for number, one in enumerate(self.sets)
            for prompt in one.prompts
            for sample in range(size)
        ]
        scoring: Scoring[Rollout] = self.scorer.begin([x.text for _, x, _ in asked], self.read)
        ended: dict[int, Rollout] = {}
        requests = [self._request(number, prompt, sample) for number, prompt, sample in asked]
        for i, done in ask(requests):
            _, prompt, sample = asked[i]
            ended[i] = to_rollout(prompt, sample, done)
            scoring.add(i, ended[i])
        rollouts = [ended[i] for i in sorted(ended)]
        names = [self.sets[number].name for number, _, _ in asked]
        with self.completions.kept(step, "eval", rollouts, names):
            rewards = wait_for_rewards(scoring, self.progress, self._failed)
        self.completions.write(step, "eval", rollouts, rewards, scoring.scores, names)
        total = self._evaluated(rollouts, rewards, scoring)
        ends = accumulate(len(one.prompts) for one in self.sets)
        parts = [
            total.part(one.name, slice(end - len(one.prompts), end))
            for one, end in zip(self.sets, ends, strict=True)
        ]
        seconds = time.perf_counter() - start
        few = self.few
        firsts = slice(0, few * size, size)  # one response to each problem
        samples = list(self.completions.samples(rollouts[firsts], rewards[firsts], few))
        return Evaluation(total, parts, seconds, samples)

    def _request(self, number: int, prompt: Prompt, sample: int) -> Request:
        ids = (self.seed, EVAL, number, prompt.id, sample)
        return sampling_request(self.sampling, prompt, ids, self.asked.temperature)

    def _evaluated(
        self, rollouts: Sequence[Rollout], rewards: np.ndarray, scoring: Scoring[Rollout]
    ) -> Evaluated:
        shape = (-1, self.asked.num_generations)
        answers = scoring.each(lambda x: final_answer(x.completion, x.prompt))
        lengths = np.array([len(one.tokens) for one in rollouts])
        is_cut = np.array([one.finish is FinishReason.LENGTH for one in rollouts])
        return Evaluated(
            "all",
            rewards.reshape(shape),
            lengths.reshape(shape),
            is_cut.reshape(shape),
            [answers[i : i + shape[1]] for i in range(0, len(answers), shape[1])],
            scoring.scores,
        )


def _line(one: Evaluated, where: str) -> str:
    k = one.num_samples
    mean = one.mean().value
    passed = f", pass@{k} {one.pass_at(k).value:.3f}" if k > 1 else ""
    return f"held-out reward{where} {mean:.3f}{passed} ({len(one.rewards)} prompts)"
