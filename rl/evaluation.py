"""Evaluates a policy from several samples of each held-out problem: the metrics `eval/*`.

These are mean reward, pass@k and majority votes, with confidence intervals. Pure functions of plain
values. Does not know how samples are generated or scored.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from pat_jax.rl.rewards.report import mean_reward
from pat_jax.rl.rewards.weighted_sum import FunctionScores

PASSES = 1.0  # the least reward with which a sample passes
NORMAL_95 = 1.959963984540054  # 95 % of a normal distribution are within ± so many deviations


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, seen as a sample of all problems of their kind."""

    value: float  # the mean; NaN without problems
    half_width: float  # half the width of the 95 % interval; NaN if all problems have one value
    num_problems: int

    @classmethod
    def of(cls, values: Float[np.ndarray, " problems"]) -> "Estimate":
        """Returns the mean with a normal interval by the central limit theorem.

            SE = √(Σᵢ (vᵢ - v̄)² / (n (n - 1)))

        n is the number of problems: samples of one problem are not independent, so together they
        give one value vᵢ. If all values are equal (say no problem is solved), the formula would
        give 0, as if nothing were uncertain. Then there is no interval.

        Args:
          values: value of each problem; NaN means no value, and does not count.

        Reference: Miller 2024, https://arxiv.org/abs/2411.00640, sections 2.1 and 3.1.
        """
        known = np.asarray(values, np.float64)
        known = known[~np.isnan(known)]
        if not known.size:
            return cls(math.nan, math.nan, 0)
        differ = known.min() < known.max()
        error = known.std(ddof=1) / math.sqrt(known.size) if differ else math.nan
        return cls(float(known.mean()), float(NORMAL_95 * error), known.size)


@dataclass(frozen=True)
class Evaluated:
    """Scored samples of a set of problems; each problem has the same number of samples."""

    name: str  # name of the set of problems
    rewards: Float[np.ndarray, "problems samples"]  # NaN for a sample without a reward
    lengths: Int[np.ndarray, "problems samples"]  # lengths of responses in tokens
    is_cut: Bool[np.ndarray, "problems samples"]  # whether the response was truncated
    answers: Sequence[Sequence[str | None]]  # final answers, by problem and sample
    functions: Sequence[FunctionScores]  # scores of the samples, problem after problem

    @property
    def num_samples(self) -> int:
        """Number of samples of each problem."""
        return self.rewards.shape[1]

    @property
    def num_failed(self) -> int:
        """Number of samples without a reward."""
        return int(np.isnan(self.rewards).sum())

    @property
    def passes(self) -> Bool[np.ndarray, "problems samples"]:
        return self.rewards >= PASSES  # NaN gives False

    def part(self, name: str, problems: slice) -> "Evaluated":
        """Returns a slice of the problems, under another name."""
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
        """Returns the mean reward (mean@k), first over a problem's samples, then over problems."""
        is_scored = ~np.isnan(self.rewards)
        counts = is_scored.sum(axis=1)
        sums = np.where(is_scored, self.rewards, 0).sum(axis=1, dtype=np.float64)
        return Estimate.of(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))

    def pass_at(self, k: int) -> Estimate:
        """Returns pass@k over the problems that have at least k samples with a reward."""
        scored = (~np.isnan(self.rewards)).sum(axis=1).tolist()
        passed = self.passes.sum(axis=1).tolist()
        found = [pass_at_k(n, c, k) for n, c in zip(scored, passed, strict=True)]
        return Estimate.of(np.array(found, np.float64))

    def majority(self) -> Estimate | None:
        """Returns maj@k over all k samples, or None if k is 1 or no response has a final answer."""
        has_answers = any(answer is not None for row in self.answers for answer in row)
        if self.num_samples == 1 or not has_answers:
            return None
        is_scored = (~np.isnan(self.rewards)).tolist()
        found = map(majority_passes, self.answers, self.passes.tolist(), is_scored)
        return Estimate.of(np.array(list(found), np.float64))


def describe_evaluation(total: Evaluated, parts: Sequence[Evaluated]) -> dict[str, float | int]:
    """Returns the metrics `eval/*`: over all problems and, if there are several sets, over each."""
    found = _describe(total, "eval/")
    found |= {
        f"eval/reward/{one.name}": mean_reward(one.array) for one in _several(total.functions)
    }
    found |= {"eval/failed": total.num_failed}
    for part in parts if len(parts) > 1 else ():
        found |= _describe(part, f"eval/{part.name}/")
    return found


def _describe(one: Evaluated, prefix: str) -> dict[str, float | int]:
    k = one.num_samples
    mean = one.mean()
    majority = one.majority()
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
    # Leave out missing intervals: trackers warn of NaN, and this is nothing to warn of.
    return {name: x for name, x in found.items() if not (np.isnan(x) and name.endswith("_ci95"))}


def _several(functions: Sequence[FunctionScores]) -> Sequence[FunctionScores]:
    return functions if len(functions) > 1 else ()


def report(one: Evaluated, ks: Sequence[int]) -> Mapping[str, object]:
    """Returns the results as JSON values, with pass@k for each k of `ks`; null stands for NaN."""
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
    low = estimate.value - estimate.half_width
    high = estimate.value + estimate.half_width
    return {
        "value": _number(estimate.value),
        "low": _number(low),
        "high": _number(high),
        "problems": estimate.num_problems,
    }


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the unbiased estimate of the chance that one of k samples of a problem passes, from n
    samples of which c pass. NaN if there are fewer than k samples.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - Πᵢ (1 - k / i), i from n - c + 1 to n

    Reference: Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1.
    """
    if n < k:
        return math.nan
    if n - c < k:
        return 1.0  # fewer than k samples fail, so any k include one that passes
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority_passes(
    answers: Sequence[str | None], passes: Sequence[bool], is_scored: Sequence[bool]
) -> float:
    """Returns whether the most frequent answer to a problem passes (maj@k, self-consistency).

    Equally frequent answers are averaged. Answers are compared as texts without spaces. A sample
    without an answer has no vote.

    Args:
      is_scored: whether each sample has a reward; answers of samples without one have no vote.

    Returns:
      0 or 1, or a number between them if answers tie or if only some samples with the answer pass.
      0 if no sample has an answer; NaN if no sample is scored.

    Reference: Wang et al. 2022, https://arxiv.org/abs/2203.11171.
    """
    if not any(is_scored):
        return math.nan
    votes: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for answer, has_passed, has_vote in zip(answers, passes, is_scored, strict=True):
        if answer is not None and has_vote:
            text = "".join(answer.split())
            votes[text] += 1
            passed[text] += has_passed
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [text for text, count in votes.items() if count == most]
    return float(np.mean([passed[text] / most for text in winners]))
