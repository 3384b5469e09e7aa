"""What a prompt's other responses say about the length of one: a normal hierarchy of scores.

A length is given by its normal score z under the baseline distribution (z = 0 is the median; all
scores together are standard normal, whatever the lengths' distribution is: a Gaussian copula).
Sample i of prompt p in epoch e, of a rollout with a shift u common to all, has

    z_i = u + θ_pe + ε_i,   θ_pe ~ N(0, ρ),   ε_i ~ N(0, 1 - ρ),   corr(θ_pe, θ_p,e+1) = φ

Censored scores enter by their probability Φ((u + θ - z) / √(1 - ρ)). Knows scores; no tokens.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import ndtr

SHARE, SHARE_WEIGHT = 0.3, 10.0  # ρ before anything was seen, and the prompts it is worth
PERSISTENCE, PERSISTENCE_WEIGHT = 0.7, 5.0  # φ, and the prompts seen twice it is worth
MAX_SHARE = 0.95
MAX_PROMPTS = 16_384  # remembered; the first ones seen (see `PromptEffects.updated`)
NEWTON_STEPS = 5  # at most
COMMON_STEPS = 8  # at most
CLOSE = 1e-4  # scores; a step of Newton's that is shorter is the last: they are squared each time
STRETCH_WEIGHT = 20.0  # responses that a rollout's scores having their usual spread is worth
GRID = np.arange(-5, 5.01, 0.125)  # scores to which those of running sequences are rounded


@dataclass(frozen=True)
class Evidence:
    """Scores of a rollout's responses so far, and the index of the prompt of each."""

    ended: np.ndarray  # float64[ended]
    ended_of: np.ndarray  # int[ended]
    open: np.ndarray  # float64[open], of sequences that are running or were cut there
    open_of: np.ndarray  # int[open]

    @property
    def num_scores(self) -> int:
        return len(self.ended) + len(self.open)

    def minus(self, offset: np.ndarray) -> "Evidence":
        """Less what is expected of each prompt, float64[prompts]."""
        ended, open_ = self.ended - offset[self.ended_of], self.open - offset[self.open_of]
        return replace(self, ended=ended, open=open_)


def _none() -> np.ndarray:
    return np.zeros(0)


@dataclass(frozen=True)
class PromptEffects:
    """θ of each prompt as its last epoch left it, and what ρ and φ were seen to be."""

    prompt: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # ids, ascending
    mean: np.ndarray = field(default_factory=_none)  # float64[known prompts]
    variance: np.ndarray = field(default_factory=_none)  # float64[known prompts]
    # Fading sums over prompts: products of siblings' scores and squares of scores, prompt by
    # prompt the mean; products of a prompt's mean score and its θ of the last epoch, squares of θ.
    products: float = 0.0
    squares: float = 0.0
    products_past: float = 0.0
    squares_past: float = 0.0

    @property
    def share(self) -> float:
        """ρ, the prompt's share of the variance: the correlation of two siblings."""
        products = SHARE_WEIGHT * SHARE + self.products
        return min(max(products / (SHARE_WEIGHT + self.squares), 0.0), MAX_SHARE)

    @property
    def persistence(self) -> float:
        """φ, the regression of θ on the last epoch's."""
        products = PERSISTENCE_WEIGHT * PERSISTENCE + self.products_past
        return min(max(products / (PERSISTENCE_WEIGHT + self.squares_past), 0.0), 1.0)

    def expected(self, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of θ before a response is seen, float64[prompts] each."""
        at, is_known = self._find(prompt)
        mean, variance = np.zeros(len(prompt)), np.full(len(prompt), self.share)
        persistence, at = self.persistence, at[is_known]
        mean[is_known] = persistence * self.mean[at]
        kept = persistence**2
        variance[is_known] = kept * self.variance[at] + (1 - kept) * self.share
        return mean, variance

    def outlook(
        self, prompt: np.ndarray, evidence: Evidence, shift_variance: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of one more score of each prompt, float64[prompts] each.

        For a running sequence, whose own survival is not evidence: its being conditional on that
        is left to the caller, and one running sequence of each prompt does not count here.

        Args:
          prompt: int[prompts], ids.
          evidence: the scores of all their responses so far.
          shift_variance: of the common shift u, before this rollout.
        """
        mean, variance = self.expected(prompt)
        noise = 1 - self.share
        common = _common(evidence, mean, variance, noise, shift_variance, spare=1)
        noise *= common.stretch
        variance = common.stretch * variance + common.doubt
        mean, variance = _prompt_posterior(evidence, mean + common.shift, variance, noise, spare=1)
        return mean, variance + noise

    def updated(
        self, prompt: np.ndarray, evidence: Evidence, shift_variance: float, keep: float
    ) -> "PromptEffects":
        """The effects after a whole rollout's scores, those of cut responses open.

        A new prompt is remembered while there is room. The oldest is not dropped for it: where
        prompts come round in turn, each would be dropped shortly before it is needed.
        """
        mean, variance = self.expected(prompt)
        noise = 1 - self.share
        common = _common(evidence, mean, variance, noise, shift_variance, spare=0)
        evidence = evidence.minus(np.full(len(prompt), common.shift))
        mean, variance = _prompt_posterior(evidence, mean, variance, noise, spare=0)
        at, is_known = self._find(prompt)
        means, products, squares, has_siblings = _moments(evidence, len(prompt))
        past = self.mean[at[is_known]]
        learned = replace(
            self,
            products=keep * self.products + float(products[has_siblings].sum()),
            squares=keep * self.squares + float(squares[has_siblings].sum()),
            products_past=keep * self.products_past + float((means[is_known] * past).sum()),
            squares_past=keep * self.squares_past + float((past**2).sum()),
        )
        return learned._remembering(prompt, mean, variance)

    def _find(self, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each prompt is among the known ones, and whether it is."""
        if not len(self.prompt):
            return np.zeros(len(prompt), int), np.zeros(len(prompt), bool)
        at = np.minimum(np.searchsorted(self.prompt, prompt), len(self.prompt) - 1)
        return at, self.prompt[at] == prompt

    def _remembering(
        self, prompt: np.ndarray, mean: np.ndarray, variance: np.ndarray
    ) -> "PromptEffects":
        mean, variance = np.round(mean, 4), np.round(variance, 4)  # short in a checkpoint
        at, is_known = self._find(prompt)
        means, variances = self.mean.copy(), self.variance.copy()
        means[at[is_known]], variances[at[is_known]] = mean[is_known], variance[is_known]
        new = np.flatnonzero(~is_known)[: MAX_PROMPTS - len(self.prompt)]
        prompts = np.concatenate([self.prompt, prompt[new]]).astype(np.int64)
        order = np.argsort(prompts)
        return replace(
            self,
            prompt=prompts[order],
            mean=np.concatenate([means, mean[new]])[order],
            variance=np.concatenate([variances, variance[new]])[order],
        )


def posterior(
    mean: np.ndarray,
    variance: np.ndarray,
    noise: float,
    count: np.ndarray,
    total: np.ndarray,
    open_count: np.ndarray,
    threshold: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Laplace's approximation to a normal mean's posterior, censored observations among them.

    Its logarithm is concave, so Newton's steps find the one mode:
    -(θ - mean)² / 2·variance - Σ (z - θ)² / 2·noise + Σ log Φ((θ - threshold) / √noise).

    Args:
      mean, variance: of the prior, float64[n].
      noise: variance of an observation about θ.
      count, total: observations and their sum, float64[n].
      open_count, threshold: observations known to be larger than a threshold, float64[n, k].

    Returns:
      Mode and inverse curvature, float64[n] each.
    """
    sigma = np.sqrt(noise)
    precision = 1 / variance + count / noise
    known = mean / variance + total / noise
    mode = known / precision
    if not open_count.any():
        return mode, 1 / precision
    # The gradient is convex and falls, and here it is positive: Newton climbs and never overshoots.
    curvature = precision
    for _ in range(NEWTON_STEPS):
        x = _clip((mode[:, None] - threshold) / sigma)
        mills = np.exp(-(x**2) / 2) / (np.sqrt(2 * np.pi) * ndtr(x))
        pull = open_count * mills
        gradient = known - precision * mode + pull.sum(axis=1) / sigma
        curvature = precision + (pull * (mills + x)).sum(axis=1) / noise
        step = gradient / curvature
        mode = mode + step
        if step.max() < CLOSE:
            break
    return mode, 1 / curvature


def _clip(x: np.ndarray, most: float = 35.0) -> np.ndarray:
    """To within `most` of 0: of a score, where a normal density is still more than nothing."""
    return np.minimum(np.maximum(x, -most), most)  # a third of what `np.clip` takes


@dataclass(frozen=True)
class Common:
    """What is common to all scores of a rollout."""

    shift: float  # u
    doubt: float  # variance of u
    stretch: float  # all other variances are this many times what they were


def _common(
    evidence: Evidence,
    mean: np.ndarray,
    variance: np.ndarray,
    noise: float,
    shift_variance: float,
    *,
    spare: int,
) -> Common:
    """From scores less what their prompts let expect: Newton's steps for u, EM's for the stretch.

    Siblings say less than as many strangers: each counts 1 / (1 + (n - 1)·ρ), n to a prompt (the
    design effect of Kish 1965, eq. 8.2). A normal score beyond c has, with x = (c - u) / s and
    Mills' m = φ(x) / Φ(-x), the second moment s²(1 + x·m) about u.

    Args:
      spare: running sequences that do not count, as in `outlook`.
    """
    if not evidence.num_scores:
        return Common(0.0, shift_variance, 1.0)
    left, own = evidence.minus(mean), float(variance.mean())
    siblings = max(evidence.num_scores / len(mean) - 1, 0)
    weight = 1 / (1 + siblings * own / (own + noise))
    opened = _on_grid(left.open) * weight * (1 - spare / max(len(left.open), 1))
    count, total = weight * len(left.ended), weight * left.ended.sum()
    squares, weights = weight * (left.ended @ left.ended), opened.sum() + count
    usual = square = own + noise
    shift, curvature = 0.0, 1.0
    for _ in range(COMMON_STEPS):
        before, sigma = (shift, square), np.sqrt(square)
        x = _clip((GRID - shift) / sigma)
        mills = np.exp(-(x**2) / 2) / (np.sqrt(2 * np.pi) * ndtr(-x))
        pull = (opened @ mills) / sigma
        gradient = (total - count * shift) / square + pull - shift / shift_variance
        bend = opened @ (mills * (mills - x))
        curvature = (count + bend) / square + 1 / shift_variance
        shift += gradient / curvature
        beyond = square * (opened @ (1 + x * mills))
        spread = squares - 2 * shift * total + count * shift**2 + beyond
        square = (STRETCH_WEIGHT * usual + spread) / (STRETCH_WEIGHT + weights)
        if max(abs(shift - before[0]), abs(square - before[1])) < CLOSE:
            break
    return Common(float(shift), float(1 / curvature), float(square / usual))


def _on_grid(scores: np.ndarray) -> np.ndarray:
    """int[grid]: how many scores are nearest to each point of `GRID`."""
    place = np.rint((_clip(scores, GRID[-1]) - GRID[0]) / (GRID[1] - GRID[0]))
    return np.bincount(place.astype(int), minlength=len(GRID))


def _prompt_posterior(
    evidence: Evidence, mean: np.ndarray, variance: np.ndarray, noise: float, *, spare: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of each prompt's θ. Its open scores are taken to be alike: their mean."""
    size = len(mean)
    opened = np.bincount(evidence.open_of, minlength=size)
    threshold = np.bincount(evidence.open_of, evidence.open, size) / np.maximum(opened, 1)
    return posterior(
        mean,
        np.maximum(variance, 1e-6),
        noise,
        np.bincount(evidence.ended_of, minlength=size),
        np.bincount(evidence.ended_of, evidence.ended, size),
        np.maximum(opened - spare, 0)[:, None],
        threshold[:, None],
    )


def _moments(
    evidence: Evidence, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each prompt: mean score, mean product of two siblings, mean square, whether it has siblings.

    An open score counts as the mean of the standard normal beyond it.
    """
    beyond = _clip(evidence.open)
    beyond = np.exp(-(beyond**2) / 2) / (np.sqrt(2 * np.pi) * ndtr(-beyond))
    scores = np.concatenate([evidence.ended, beyond])
    of = np.concatenate([evidence.ended_of, evidence.open_of])
    count = np.bincount(of, minlength=size)
    total, squares = np.bincount(of, scores, size), np.bincount(of, scores**2, size)
    pairs = np.maximum(count * (count - 1), 1)
    each = np.maximum(count, 1)
    return total / each, (total**2 - squares) / pairs, squares / each, count > 1
