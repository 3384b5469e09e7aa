"""Predicts how many more tokens running responses will have, from all responses so far.

Two parts: the `Baseline` distribution of lengths (Kaplan-Meier, with a prior, `baseline.py`), and
the `PromptMeans`, by which waiting requests are put in order. Plans nothing; knows no device.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.planning.lengths.baseline import Baseline

VERSION = 3  # of the JSON
SMALLEST = 1e-300  # smaller probabilities of survival count as this
MEAN_POINTS = 257  # lengths at which a curve is sampled for its mean
MAX_PROMPTS = 16_384  # most prompts remembered: the first ones (see `PromptMeans.updated`)
GROWTH = 1.125  # a stream has news when this many times as many responses have ended


@dataclass(frozen=True)
class PromptMeans:
    """The running mean of the response length of each prompt so far."""

    prompt: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # ids, ascending
    mean: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64[prompts], tokens

    def expected(self, prompt: np.ndarray, otherwise: np.ndarray | float) -> np.ndarray:
        """Returns the predicted tokens of the next response to each prompt, float64[prompts]. For a
        new prompt they are `otherwise`."""
        at, is_known = self._find(prompt)
        mean = np.full(len(prompt), otherwise)
        mean[is_known] = self.mean[at[is_known]]
        return mean

    def updated(self, lengths: np.ndarray, prompt: np.ndarray) -> "PromptMeans":
        """Returns the means after a rollout: `lengths` has the tokens of each response,
        int[responses], and `prompt` the id of its prompt. A prompt's mean so far weighs as much as
        this rollout's. A new prompt is remembered while there is room. No old one is dropped for
        it: as prompts recur in turn, each would be dropped shortly before it is needed."""
        ids, of = np.unique(prompt, return_inverse=True)
        mean = np.bincount(of, lengths) / np.bincount(of)
        mean = np.round((self.expected(ids, mean) + mean) / 2, 1)  # short in a checkpoint
        at, is_known = self._find(ids)
        means = self.mean.copy()
        means[at[is_known]] = mean[is_known]
        new = np.flatnonzero(~is_known)[: MAX_PROMPTS - len(self.prompt)]
        prompts = np.append(self.prompt, ids[new])
        means = np.append(means, mean[new])
        order = np.argsort(prompts)
        return PromptMeans(prompts[order], means[order])

    def _find(self, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the index of each prompt among the known ones, and whether it is known."""
        at = np.searchsorted(self.prompt, prompt)
        is_known = at < len(self.prompt)
        is_known[is_known] = self.prompt[at[is_known]] == prompt[is_known]
        return at, is_known


@dataclass(frozen=True)
class LengthModel:
    """An immutable estimate of response lengths. Each rollout makes an `updated` one, and plans ask
    for its `survival`."""

    baseline: Baseline
    prompts: PromptMeans = field(default_factory=PromptMeans)
    keep: float = 0.8  # weight of the past at each update: the distribution drifts

    @classmethod
    def empty(cls, cap: int) -> "LengthModel":
        """Returns the model before any response was observed; the longest have `cap` tokens."""
        return cls(Baseline.empty(cap))

    @property
    def cap(self) -> int:
        return self.baseline.cap

    def with_cap(self, cap: int) -> "LengthModel":
        """Returns the same model under another cap; responses that were cut stay as they are."""
        return replace(self, baseline=self.baseline.with_cap(cap))

    def updated(
        self, lengths: np.ndarray, is_cut: np.ndarray, prompt: np.ndarray | None = None
    ) -> "LengthModel":
        """Returns the model after the responses of one more rollout.

        Args:
          lengths: int[responses], tokens of each response.
          is_cut: bool[responses], stopped by the cap and not by the policy.
          prompt: int[responses], ids of their prompts; without them prompt means stay as they are.
        """
        if not len(lengths):
            return self
        baseline = self.baseline.plus(lengths, is_cut, keep=self.keep)
        prompts = self.prompts if prompt is None else self.prompts.updated(lengths, prompt)
        return replace(self, baseline=baseline, prompts=prompts)

    def survival(
        self, generated: np.ndarray, remaining_tokens: np.ndarray, moments: np.ndarray
    ) -> np.ndarray:
        """Returns P(still running after so many more steps | running now), float64[running,
        moments].

        A response that is running with t tokens is longer than t.

        Args:
          generated: int[running], tokens of each response so far.
          remaining_tokens: int[running], tokens that may still be generated; then P is 0.
          moments: int[moments], numbers of decode steps from now.
        """
        tokens = np.minimum(generated[:, None] + moments[None, :], self.cap)
        alive = self._alive[tokens] / self._alive[np.minimum(generated, self.cap)][:, None]
        return np.where(moments[None, :] < remaining_tokens[:, None], alive, 0.0)

    def expected(self, prompt: np.ndarray) -> np.ndarray:
        """Returns the predicted tokens of the next response to each prompt, float64[prompts]."""
        moments = mean_moments(self.cap)
        whole = self.survival(np.zeros(1, int), np.array([self.cap + 1]), moments)
        return self.prompts.expected(prompt, float(mean_tokens(whole, moments)[0]))

    @cached_property
    def _alive(self) -> np.ndarray:
        """P(a response is longer than t tokens), float64[cap + 1]."""
        bins = self.baseline.bins(np.arange(self.cap + 1))
        return np.maximum(np.exp(self.baseline.log_survival), SMALLEST)[bins]

    def to_json(self) -> dict[str, Any]:
        """Returns the model as numbers and lists for JSON, which keeps floats exactly."""
        return {
            "version": VERSION,
            "keep": self.keep,
            "cap": self.baseline.cap,
            "prior_weight": self.baseline.prior_weight,
            "ended": self.baseline.ended.tolist(),
            "cut": self.baseline.cut.tolist(),
            "prompts": self.prompts.prompt.tolist(),
            "means": self.prompts.mean.tolist(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LengthModel":
        """Reads what `to_json` wrote.

        Raises:
          UserError: another version wrote it.
          ValueError, TypeError, LookupError, AttributeError, ArithmeticError: the data is damaged.
        """
        if data.get("version") != VERSION:
            raise UserError(
                f"the length model was saved as version {data.get('version', 1)}, this is version "
                f"{VERSION}: start the run afresh, or resume it with the pat_jax that wrote it."
            )
        baseline = Baseline.empty(data["cap"], data["prior_weight"])
        ended, cut, means = (np.array(data[name], float) for name in ("ended", "cut", "means"))
        prompts = PromptMeans(np.array(data["prompts"], np.int64), means)
        pairs = (ended, baseline.ended), (cut, baseline.ended), (prompts.mean, prompts.prompt)
        single = [data[name] for name in ("cap", "prior_weight", "keep")]
        numbers = np.concatenate([ended, cut, prompts.mean, np.array(single, float)])
        is_sound = ((numbers >= 0) & (numbers < 2**53)).all()
        if any(x.shape != like.shape for x, like in pairs) or not is_sound:
            raise ValueError("the counts of lengths are not those of a length model")
        return cls(replace(baseline, ended=ended, cut=cut), prompts, data["keep"])


class StreamedLengths:
    """The responses of one stream of requests, and the length model that they imply so far.

    Short responses end first: counted alone they would make all look short. So running ones count
    too, as cut at their present length (staggered entry: Kalbfleisch, Prentice 2002, section 3.2).
    """

    def __init__(self, before: LengthModel, count: int):
        """`before`: the length model when the stream of `count` requests began."""
        self.before = before
        self.tokens = np.zeros(count, int)
        self.has_ended = np.zeros(count, bool)  # by itself: what was cut has not
        self._due_at = 1

    def note(self, i: int, tokens: int, *, has_ended: bool) -> None:
        """Records the tokens of request i so far, and whether it has ended by itself."""
        self.tokens[i] = tokens
        self.has_ended[i] |= has_ended

    def has_news(self) -> bool:
        """Returns whether `model` should be computed again: `GROWTH` times as many responses have
        ended as when this was last True."""
        count = int(self.has_ended.sum())
        if count < self._due_at:
            return False
        self._due_at = int(GROWTH * count) + 1
        return True

    def model(self) -> LengthModel:
        has_begun = self.tokens > 0
        return self.before.updated(self.tokens[has_begun], ~self.has_ended[has_begun])


def mean_moments(most: int) -> np.ndarray:
    """Returns the lengths at which `mean_tokens` needs the curve of at most `most` tokens."""
    return np.unique(((most - 1) * np.linspace(0, 1, MEAN_POINTS) ** 2).astype(int))


def mean_tokens(alive: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Returns the mean length by each curve, float[curves]: the sum over t of P(longer than t), by
    the trapezoidal rule. `alive` has this P for each t in `moments`."""
    return np.trapezoid(alive, moments, axis=1) + (alive[:, 0] + alive[:, -1]) / 2
