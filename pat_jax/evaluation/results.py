"""The results of an evaluation: results.json, and a table for people. Knows only numbers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pat_jax.common.text_table import Cell, percent, text_table
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.options import RESULTS_FILE
from pat_jax.rl.evaluation import Estimate, Evaluated, report
from pat_jax.run.evaluation import Evaluation
from pat_jax.run.logging.completions import COMPLETIONS_FILE
from pat_jax.version import __version__

TOTAL = "all"


@dataclass(frozen=True, repr=False)
class EvaluationResults:
    """The results of an evaluation; `print` shows them as a table.

    Attributes:
      folder: the folder of results.json and completions.jsonl.
      content: what results.json holds.
      told: the results in words.
    """

    folder: Path
    content: Mapping[str, Any]
    told: str

    @property
    def sets(self) -> Mapping[str, Mapping[str, Any]]:
        """The results of each data set by its name, as results.json has them: `mean`, `pass` by k
        and `majority` of a policy, `accuracy` of a reward model … (docs/generate.md)."""
        return self.content["sets"]

    @property
    def all(self) -> Mapping[str, Any]:
        """The same over all data sets together."""
        return self.content[TOTAL]

    def __repr__(self) -> str:
        return self.told


def content(
    config: EvaluateConfig,
    found: Evaluation,
    left_out: Mapping[str, Mapping[str, int]],
    num_tokens: int,
) -> str:
    """Returns the text of results.json. `left_out` counts the problems by set and reason.
    `num_tokens` counts the tokens that this process generated, not an earlier one."""
    ks = config.ks
    whole: dict[str, Any] = {
        "pat_jax": __version__,
        "options": asdict(replace(config, resume=False)),
        "seconds": found.seconds,
        "tokens_per_s": num_tokens / found.seconds,
        "sets": {
            one.name: {**report(one, ks), "left_out": left_out[one.name]} for one in found.parts
        },
        TOTAL: report(found.total, ks),
    }
    return json.dumps(whole, indent=2, ensure_ascii=False)


def words(config: EvaluateConfig, found: Evaluation, num_tokens: int) -> str:
    """Returns the results as a table for people."""
    several = [*found.parts, found.total] if len(found.parts) > 1 else list(found.parts)
    seconds = found.seconds
    speed = f"{num_tokens:,} tokens in {seconds:.1f} s, {num_tokens / seconds:,.0f} a second"
    names = ", ".join((RESULTS_FILE, COMPLETIONS_FILE))
    return "\n".join([table(several, config.ks), "", speed, f"in {config.out}: {names}"])


def table(rows: Sequence[Evaluated], ks: Sequence[int]) -> str:
    """Returns a table with a line for each problem set; ± is half of the 95 % interval."""
    n = rows[0].num_samples
    has_votes = any(one.majority() for one in rows)
    # pass@1 differs from the mean reward if some reward is neither 0, 1 nor NaN.
    every = [one.rewards for one in rows]
    differs = not all(((x == 0) | (x == 1) | (x != x)).all() for x in every)
    shown = [k for k in ks if k > 1 or differs]
    header = ["", "problems", "samples", "mean", *(f"pass@{k}" for k in shown)]
    header += [f"maj@{n}"] * has_votes + ["tokens", "truncated"]
    if has_failed := any(one.num_failed for one in rows):
        header.append("without reward")
    lines: list[list[Cell]] = []
    for one in rows:
        estimates = [one.mean(), *map(one.pass_at, shown)]
        estimates += [one.majority()] * has_votes
        line: list[Cell] = [one.name, len(one.rewards), n, *map(estimate_words, estimates)]
        line += [float(one.lengths.mean()), percent(float(one.is_cut.mean()))]
        lines.append([*line, one.num_failed] if has_failed else line)
    return text_table(header, lines)


def estimate_words(estimate: Estimate | None) -> str:
    if estimate is None or not estimate.num_problems:
        return "-"
    if math.isnan(estimate.half_width):
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ± {estimate.half_width:.3f}"
