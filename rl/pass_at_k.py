"""What several samples of each problem say of a policy: pass@k, majority votes, and how sure that is.

Plain arrays; pure functions. Knows rewards and answers as values, not where they are from.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

NORMAL_95 = 1.959963984540054  # standard deviations on either side that hold 95 % of a normal


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, which are taken as drawn from all problems of their kind."""

    value: float  # NaN of no problem
    half_width: float  # of the 95 % interval; NaN where the problems' values do not differ
    num_problems: int

    @classmethod
    def of(cls, values: Float[np.ndarray, " problems"]) -> "Estimate":
        """The mean, and the normal interval by the central limit theorem.

            SE = √(Σᵢ (vᵢ - v̄)² / (n (n - 1)))

        Samples of one problem are not independent: all of its samples together give a problem's value,
        and problems are what is counted. Where all values are equal (none solved, say)
        the formula gives 0, as if nothing were uncertain: there is no interval then.

        Args:
          values: one a problem; NaN where there is none.

        Reference: Miller 2024, https://arxiv.org/abs/2411.00640, sections 2.1 and 3.1.
        """
        known = np.asarray(values, np.float64)
        known = known[~np.isnan(known)]
        if not known.size:
            return cls(math.nan, math.nan, 0)
        differ = known.min() < known.max()
        error = known.std(ddof=1) / math.sqrt(known.size) if differ else math.nan
        return cls(float(known.mean()), float(NORMAL_95 * error), known.size)


def pass_at_k(
    num_samples: Int[np.ndarray, " problems"], num_passed: Int[np.ndarray, " problems"], k: int
) -> Float[np.ndarray, " problems"]:
    """The chance that one of k samples passes, without bias from n ≥ k samples, c of which pass.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - Πᵢ (1 - k / i), i from n - c + 1 to n

    Returns:
      One a problem; NaN where it has fewer than k samples.

    Reference: Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1.
    """
    pairs = zip(num_samples.tolist(), num_passed.tolist(), strict=True)
    return np.array([_pass_at_k(n, c, k) for n, c in pairs], np.float64)


def _pass_at_k(n: int, c: int, k: int) -> float:
    if n < k:
        return math.nan
    if n - c < k:
        return 1.0  # no k samples without one that passes
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority_passes(
    answers: Sequence[Sequence[str | None]],
    passes: Bool[np.ndarray, "problems samples"],
    is_scored: Bool[np.ndarray, "problems samples"],
) -> Float[np.ndarray, " problems"]:
    """Whether the most frequent answer of a problem's samples passes (maj@k, self-consistency).

    Among equally frequent answers each is as likely to be taken. Answers are compared as texts
    without spaces; a sample without an answer has no vote.

    Args:
      is_scored: False where it is not known whether a sample passes; its answer has no vote either.

    Returns:
      One a problem: 0 or 1, or between them by ties and by samples of one answer of which some pass; 0
      where nothing is answered; NaN where nothing is scored.

    Reference: Wang et al. 2022, https://arxiv.org/abs/2203.11171.
    """
    rows = zip(answers, passes.tolist(), is_scored.tolist(), strict=True)
    return np.array([_majority(*row) if any(row[2]) else math.nan for row in rows], np.float64)


def _majority(
    answers: Sequence[str | None], passes: Sequence[bool], is_scored: Sequence[bool]
) -> float:
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
