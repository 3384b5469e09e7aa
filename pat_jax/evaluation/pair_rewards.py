"""The results of an evaluation of a reward model: results.json, and a table for people."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from pat_jax.common.text_table import Cell, text_table
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.options import RESULTS_FILE
from pat_jax.evaluation.results import TOTAL, estimate_words
from pat_jax.rl.algorithm.preferences import agreement
from pat_jax.rl.data.examples import Pair
from pat_jax.rl.evaluation import Estimate
from pat_jax.version import __version__


@dataclass(frozen=True)
class PairRewards:
    """A reward model's rewards of a set of preference pairs."""

    name: str
    rewards: Float[np.ndarray, "pairs 2"]  # rewards of the chosen and of the rejected text
    margins: Float[np.ndarray, " pairs"]
    subsets: Sequence[str]  # name of each pair's subset; empty: there are no subsets

    @classmethod
    def of(
        cls, name: str, pairs: Sequence[Pair], rewards: Float[np.ndarray, "pairs 2"]
    ) -> "PairRewards":
        margins = np.array([pair.margin for pair in pairs])
        return cls(name, rewards, margins, [pair.subset for pair in pairs])

    @classmethod
    def joined(cls, parts: Sequence["PairRewards"]) -> "PairRewards":
        """Returns all pairs of several sets."""
        rewards, margins = (
            np.concatenate([getattr(one, name) for one in parts]) for name in ("rewards", "margins")
        )
        return cls(TOTAL, rewards, margins, [name for one in parts for name in one.subsets])

    @property
    def accuracy(self) -> Estimate:
        """The share of pairs whose chosen text has the larger reward. Equal ones count a half."""
        apart = self.rewards[:, 0] - self.rewards[:, 1]
        return Estimate.of(np.nan_to_num(np.heaviside(apart, 0.5)))

    def report(self) -> dict[str, Any]:
        accuracy = self.accuracy
        return {
            "pairs": len(self.rewards),
            **agreement(self.rewards, margins=self.margins),
            "accuracy_ci95": None if np.isnan(accuracy.half_width) else accuracy.half_width,
        }

    def by_subset(self) -> list["PairRewards"]:
        """Returns the pairs of each subset, in the order of their names."""
        names = np.array(self.subsets, object)
        return [self._part(name, names == name) for name in sorted({*self.subsets} - {""})]

    def _part(self, name: str, chosen: Bool[np.ndarray, " pairs"]) -> "PairRewards":
        return PairRewards(name, self.rewards[chosen], self.margins[chosen], ())


def content(
    config: EvaluateConfig,
    parts: Sequence[PairRewards],
    left_out: Mapping[str, int],
    seconds: float,
) -> str:
    """Returns the text of results.json. `left_out` has the number of too long pairs of each set."""
    whole = {
        "pat_jax": __version__,
        "options": asdict(config),
        "seconds": seconds,
        "sets": {
            one.name: {
                **one.report(),
                "subsets": {part.name: part.report() for part in one.by_subset()},
                "left_out": {"too_long": left_out[one.name]},
            }
            for one in parts
        },
        TOTAL: PairRewards.joined(parts).report(),
    }
    return json.dumps(whole, indent=2, ensure_ascii=False)


def words(config: EvaluateConfig, parts: Sequence[PairRewards], seconds: float) -> str:
    """Returns a table for people: a line for each set and each of its subsets."""
    lines: list[list[Cell]] = []
    for one in [*parts, PairRewards.joined(parts)] if len(parts) > 1 else parts:
        lines.append(_line(one.name, one))
        if one.name != TOTAL:
            lines += [_line(f"  {part.name}", part) for part in one.by_subset()]
    table = text_table(["", "pairs", "accuracy", "margin"], lines)
    return f"{table}\n\n{seconds:.1f} s\nin {config.out}: {RESULTS_FILE}"


def _line(name: str, one: PairRewards) -> list[Cell]:
    margin = float(np.mean(one.rewards[:, 0] - one.rewards[:, 1]))
    return [name, len(one.rewards), estimate_words(one.accuracy), f"{margin:.3f}"]
