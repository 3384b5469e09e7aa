"""How long will it go on? Survival of the running responses, from all that was seen so far.

Two parts, each in a file of its own: the `Baseline` distribution of lengths (Kaplan-Meier, with a
prior), and the `PromptEffects` that tell a response from its prompt's earlier ones and its
siblings. Plans nothing; knows no device.
"""

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import ndtr

from pat_jax.common.errors import UserError
from pat_jax.planning.lengths.baseline import BINS_PER_EFOLD, FIRST_TOKEN, SMALLEST, Baseline
from pat_jax.planning.lengths.prompt_effects import Evidence, PromptEffects
from pat_jax.planning.types import Siblings

VERSION = 3  # of the JSON; 2 is read as well
STRANGERS = 0.02  # share of responses that have nothing to do with their prompt
SHIFT_DOUBT = 0.1  # standard deviation of a rollout's shift against those before, in scores
FIRST_SHIFT_DOUBT = 1.0  # the same before anything was seen
EXACT_ROWS = 256  # more sequences than that share curves with others much like them
MEAN_POINTS = 257  # lengths at which a curve is looked at for its mean
STEPS_PER_SCORE = 8  # to which scores are rounded then


Curves = tuple[np.ndarray, np.ndarray]  # see `LengthModel.curves`


@dataclass(frozen=True)
class LengthModel:
    """A value: `updated` with each rollout, asked for `survival` at each plan."""

    baseline: Baseline
    effects: PromptEffects = field(default_factory=PromptEffects)
    keep: float = 0.8  # weight of the past at each update: the distribution's shape drifts, too

    @classmethod
    def empty(cls, cap: int, prior_weight: float = 2.0) -> "LengthModel":
        """Nothing seen yet.

        Args:
          cap: the most tokens of a response.
          prior_weight: responses that the prior is worth; more than 0.
        """
        return cls(Baseline.empty(cap, prior_weight))

    @property
    def cap(self) -> int:
        return self.baseline.cap

    def with_cap(self, cap: int) -> "LengthModel":
        """What was seen, under another cap: a response that was cut is known to be longer, no more."""
        return replace(self, baseline=self.baseline.with_cap(cap))

    @property
    def shift_variance(self) -> float:
        """Variance of the shift that the next rollout's scores have in common."""
        return (SHIFT_DOUBT if self.baseline.at_risk[0] else FIRST_SHIFT_DOUBT) ** 2

    def updated(
        self, lengths: np.ndarray, is_cut: np.ndarray, prompt: np.ndarray | None = None
    ) -> "LengthModel":
        """The model after one more rollout's responses.

        Args:
          lengths: int[responses], tokens.
          is_cut: bool[responses], stopped by the cap and not by the policy.
          prompt: int[responses], ids of their prompts; without, no prompt is learned about.
        """
        if not len(lengths):
            return self
        baseline = self.baseline.faded(self.keep).plus(lengths, is_cut)
        model = replace(self, baseline=baseline)
        if prompt is None:
            return model
        ids, prompt_of = np.unique(prompt, return_inverse=True)
        evidence = model._evidence(lengths, is_cut, prompt_of)
        effects = self.effects.updated(ids, evidence, model.shift_variance, self.keep)
        return replace(model, effects=effects)

    def survival(
        self,
        generated: np.ndarray,
        budget: np.ndarray,
        moments: np.ndarray,
        siblings: Siblings | None = None,
    ) -> np.ndarray:
        """P(still live after so many more steps), float64[live, moments].

        Args:
          generated: int[live], tokens so far of sequences that are live with them.
          budget: int[live], tokens they may still sample; nothing lives beyond.
          moments: int[moments], steps from now.
          siblings: what else is known of this rollout; without it every prompt is a stranger.
        """
        curves, curve_of = self.curves(generated, moments, siblings)
        alive = curves[curve_of]
        late = np.flatnonzero(moments >= budget.min(initial=self.cap))
        alive[:, late] *= moments[None, late] < budget[:, None]
        return alive

    def curves(
        self, generated: np.ndarray, moments: np.ndarray, siblings: Siblings | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """`survival` without the budget, sequences with much the same curve counted as one.

        Returns:
          float64[curves, moments], and int[live], the curve of each sequence.
        """
        for asked, found in self._latest:
            same = asked[0] is siblings and np.array_equal(asked[1], generated)
            if same and np.array_equal(asked[2], moments):
                return found
        if siblings is None:
            mean, spread = np.zeros(len(generated)), np.ones(len(generated))
        else:
            mean, spread = self._outlook(generated, siblings)
        score = self._scores[np.minimum(generated, self.cap)]
        rows, row_of = _alike(generated, mean, spread, score)
        found = self._curves(*rows, moments, are_strangers=siblings is None), row_of
        self._latest[:] = [((siblings, generated.copy(), moments), found)]
        return found

    def expected(self, prompt: np.ndarray) -> np.ndarray:
        """Tokens of the next response to each prompt, float64[prompts], by their ids, int[prompts]."""
        ids, prompt_of = np.unique(prompt, return_inverse=True)
        none = np.zeros(0, int)
        siblings = Siblings(ids, np.arange(len(ids)), none, none, np.zeros(0, bool))
        moments = mean_moments(self.cap)
        curves, curve_of = self.curves(np.zeros(len(ids), int), moments, siblings)
        return mean_tokens(curves, moments)[curve_of][prompt_of]

    def _outlook(self, generated: np.ndarray, siblings: Siblings) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each running sequence's score, float64[live] each."""
        lengths = np.concatenate([generated, siblings.done])
        is_open = np.concatenate([np.ones(len(generated), bool), siblings.is_cut])
        prompt_of = np.concatenate([siblings.of_live, siblings.of_done])
        evidence = self._evidence(lengths, is_open, prompt_of)
        mean, variance = self.effects.outlook(siblings.prompt, evidence, self.shift_variance)
        return mean[siblings.of_live], np.sqrt(variance)[siblings.of_live]

    def _evidence(
        self, lengths: np.ndarray, is_open: np.ndarray, prompt_of: np.ndarray
    ) -> Evidence:
        bins = self._bin_of[np.minimum(lengths, self.cap)]
        ended, opened = bins[~is_open], bins[is_open]
        return Evidence(
            self.baseline.end_scores[ended],
            prompt_of[~is_open],
            self.baseline.scores[opened],
            prompt_of[is_open],
        )

    @cached_property
    def _latest(self) -> list[tuple[tuple[Siblings | None, np.ndarray, np.ndarray], Curves]]:
        """What `curves` was asked last: moves between groups are priced for the load of the plan before."""
        return []

    @cached_property
    def _bin_of(self) -> np.ndarray:
        """int[cap + 1], the baseline's bin of each number of tokens."""
        return self.baseline.bins(np.arange(self.cap + 1))

    @cached_property
    def _alive(self) -> np.ndarray:
        """P(longer than so many tokens), float64[cap + 1]."""
        return np.maximum(np.exp(self.baseline.log_survival), SMALLEST)[self._bin_of]

    @cached_property
    def _scores(self) -> np.ndarray:
        """Normal score of living with so many tokens, float64[cap + 1]."""
        return self.baseline.scores[self._bin_of]

    def _curves(
        self,
        generated: np.ndarray,
        mean: np.ndarray,
        spread: np.ndarray,
        moments: np.ndarray,
        *,
        are_strangers: bool,
    ) -> np.ndarray:
        """P(live after each moment | live now), float64[rows, moments].

        Live with t tokens means longer than t. A few strangers among the responses keep a long life
        from being impossible: a sequence that outlives all that its prompt let expect is one.
        """
        moments = np.concatenate([[0], moments])
        tokens = np.minimum(generated[:, None] + moments[None, :], self.cap)
        alive = self._alive[tokens]
        if not are_strangers:
            known = ndtr((mean[:, None] - self._scores[tokens]) / spread[:, None])
            alive = (1 - STRANGERS) * known + STRANGERS * alive
        return alive[:, 1:] / alive[:, :1]

    def to_json(self) -> dict[str, Any]:
        """Numbers and lists that say everything; floats survive JSON exactly."""
        return {
            "version": VERSION,
            "keep": self.keep,
            "cap": self.baseline.cap,
            "prior_weight": self.baseline.prior_weight,
            "ended": self.baseline.ended.tolist(),
            "cut": self.baseline.cut.tolist(),
            "effects": {
                name: value.tolist() if isinstance(value, np.ndarray) else value
                for name, value in asdict(self.effects).items()
            },
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LengthModel":
        """What this version or the one before has written; entries of no meaning now are left out.

        Raises:
          UserError: an older version has written it.
        """
        if data.get("version") not in (2, VERSION):
            raise UserError(
                f"the length model was saved as version {data.get('version', 1)}, this is version "
                f"{VERSION}: start the run afresh, or resume it with the pat_jax that wrote it."
            )
        baseline = Baseline.empty(data["cap"], data["prior_weight"])
        ended, cut = (_counts(data, name, len(baseline.ended)) for name in ("ended", "cut"))
        effects = dict(data["effects"])
        effects["prompt"] = np.array(effects["prompt"], np.int64)
        for name in ("mean", "variance"):
            effects[name] = np.array(effects[name], float)
        return cls(
            replace(baseline, ended=ended, cut=cut),
            PromptEffects(**effects),
            data["keep"],
        )


def _counts(data: dict[str, Any], name: str, size: int) -> np.ndarray:
    """Responses by bin, float64[bins]. Version 2 has one token in the middle, at e to its level."""
    counts = np.array(data[name], float)
    if data["version"] == VERSION:
        return counts
    level = round(BINS_PER_EFOLD * data["trend"]["level"])
    bins = np.arange(len(counts)) - len(counts) // 2 + FIRST_TOKEN + level
    return np.bincount(np.clip(bins, 0, size - 1), counts, size)


def mean_moments(most: int) -> np.ndarray:
    """Where `mean_tokens` wants to see curves of responses of at most that many tokens."""
    return np.unique(((most - 1) * np.linspace(0, 1, MEAN_POINTS) ** 2).astype(int))


def mean_tokens(alive: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """The sum of P(longer than t) over all t, float[curves], by the trapezoidal rule."""
    return np.trapezoid(alive, moments, axis=1) + (alive[:, 0] + alive[:, -1]) / 2


Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens so far, mean and spread of the score


def _alike(
    generated: np.ndarray, mean: np.ndarray, spread: np.ndarray, score: np.ndarray
) -> tuple[Rows, np.ndarray]:
    """Sequences with much the same curve, as one row each; and the row of each sequence.

    Few sequences, which is where plans are decided, get curves of their own. Of many, mean, spread
    and (where they differ) tokens so far are rounded, the last on the axis of their score.
    """
    if len(generated) <= EXACT_ROWS:
        return (generated, mean, spread), np.arange(len(generated))
    codes = [_level(mean, -6, 6), _level(spread, 0, 2)]
    if (generated != generated[0]).any():
        codes.append(_level(score, -5, 5))
    key, sizes = np.zeros(len(generated), np.int64), 1
    for code, size in codes:
        key, sizes = key * size + code, sizes * size
    is_used = np.zeros(sizes, bool)
    is_used[key] = True
    used = np.flatnonzero(is_used)
    place = np.empty(sizes, np.int32)
    place[used] = np.arange(len(used))
    row_of = place[key]
    count = np.bincount(row_of)
    means = [np.bincount(row_of, value) / count for value in (generated, mean, spread)]
    return (np.rint(means[0]).astype(int), means[1], means[2]), row_of


def _level(value: np.ndarray, low: float, high: float) -> tuple[np.ndarray, int]:
    """Which step of 1 / STEPS_PER_SCORE each value falls on, and how many there are."""
    within = np.minimum(np.maximum(value, low), high)
    step = np.rint((within - low) * STEPS_PER_SCORE).astype(np.int64)
    return step, int((high - low) * STEPS_PER_SCORE) + 1
