"""The result of an evaluation: the samples of held-out problems as numbers, and the metrics `eval/*`.

Plain values. Does not know who generated or scored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from pat_jax.rl.pass_at_k import Estimate, majority_passes, pass_at_k
from pat_jax.rl.rewards.metrics import mean_reward
from pat_jax.rl.rewards.weighted_sum import FunctionScores


@dataclass(frozen=True)
class Evaluated:
    """Samples of problems, as many of each."""

    name: str  # of the set of problems
    rewards: Float[np.ndarray, "problems samples"]  # NaN: the sample has none
    lengths: Int[np.ndarray, "problems samples"]  # in tokens
    is_cut: Bool[np.ndarray, "problems samples"]  # at the longest that a response may be
    answers: Sequence[Sequence[str | None]]  # final ones, by problem and sample
    functions: Sequence[FunctionScores]  # of the samples, problem after problem
    pass_threshold: float  # a sample passes from this reward on

    @property
    def num_samples(self) -> int:
        """Samples of each problem."""
        return self.rewards.shape[1]

    @property
    def num_failed(self) -> int:
        """Samples without a reward."""
        return int(np.isnan(self.rewards).sum())

    @property
    def passes(self) -> Bool[np.ndarray, "problems samples"]:
        return self.rewards >= np.float32(self.pass_threshold)  # False of NaN

    def part(self, name: str, problems: slice) -> "Evaluated":
        """Some of the problems, one behind the other."""
        samples = slice(problems.start * self.num_samples, problems.stop * self.num_samples)
        return replace(
            self,
            name=name,
            rewards=self.rewards[problems],
            lengths=self.lengths[problems],
            is_cut=self.is_cut[problems],
            answers=self.answers[problems],
            functions=[
                replace(one, scores=one.scores[samples], numbers=one.numbers[samples])
                for one in self.functions
            ],
        )

    def mean(self) -> Estimate:
        """The mean reward (mean@k): of a problem's samples, then of problems."""
        is_scored = ~np.isnan(self.rewards)
        counts = is_scored.sum(axis=1)
        sums = np.where(is_scored, self.rewards, 0).sum(axis=1, dtype=np.float64)
        return Estimate.of(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))

    def pass_at(self, k: int) -> Estimate:
        """pass@k of the problems with k samples that have a reward."""
        scored = (~np.isnan(self.rewards)).sum(axis=1)
        return Estimate.of(pass_at_k(scored, self.passes.sum(axis=1), k))

    def majority(self) -> Estimate | None:
        """maj@k of all k samples; None of one sample, and where no response has a final answer."""
        has_answers = any(answer is not None for row in self.answers for answer in row)
        if self.num_samples == 1 or not has_answers:
            return None
        return Estimate.of(majority_passes(self.answers, self.passes, ~np.isnan(self.rewards)))


def describe_evaluation(total: Evaluated, parts: Sequence[Evaluated]) -> dict[str, float | int]:
    """The metrics `eval/*`: of all problems, and of several sets each its own."""
    found = _describe(total, "eval/")
    found |= {
        f"eval/reward/{one.name}": mean_reward(one.array) for one in _several(total.functions)
    }
    found |= {"eval/failed": total.num_failed}
    for part in parts if len(parts) > 1 else ():
        found |= _describe(part, f"eval/{part.name}/")
    return found


def _describe(one: Evaluated, prefix: str) -> dict[str, float | int]:
    k, mean, majority = one.num_samples, one.mean(), one.majority()
    found: dict[str, float | int] = {
        f"{prefix}reward": mean.value,
        f"{prefix}reward_ci95": mean.half_width,
        f"{prefix}length_mean": float(one.lengths.mean()),
        f"{prefix}truncated": float(one.is_cut.mean()),
    }
    if k > 1:
        passed = one.pass_at(k)
        found |= {f"{prefix}pass@{k}": passed.value, f"{prefix}pass@{k}_ci95": passed.half_width}
    if majority:
        found |= {f"{prefix}maj@{k}": majority.value}
    # Trackers warn of what is not a number; an interval that there is not is nothing to warn of.
    return {name: x for name, x in found.items() if not (np.isnan(x) and name.endswith("_ci95"))}


def _several(functions: Sequence[FunctionScores]) -> Sequence[FunctionScores]:
    return functions if len(functions) > 1 else ()


def report(one: Evaluated, ks: Sequence[int]) -> Mapping[str, object]:
    """The same as JSON values, pass@k of each of `ks`; null for what is not a number."""
    majority = one.majority()
    return {
        "problems": len(one.rewards),
        "samples": one.num_samples,
        "failed": one.num_failed,
        "mean": _interval(one.mean()),
        "pass": {str(k): _interval(one.pass_at(k)) for k in ks},
        "majority": majority and _interval(majority),
        "rewards": {f.name: _number(mean_reward(f.array)) for f in _several(one.functions)},
        "length_mean": float(one.lengths.mean()),
        "length_max": int(one.lengths.max()),
        "truncated": float(one.is_cut.mean()),
        "tokens": int(one.lengths.sum()),
    }


def _interval(estimate: Estimate) -> dict[str, object]:
    low, high = estimate.value - estimate.half_width, estimate.value + estimate.half_width
    return {
        "value": _number(estimate.value),
        "low": _number(low),
        "high": _number(high),
        "problems": estimate.num_problems,
    }


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value
