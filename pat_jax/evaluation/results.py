"""What an evaluation leaves: results.json, completions.jsonl, the options, and a table for people.

Knows numbers and files. Does not know how any of them comes about.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pat_jax import __version__
from pat_jax.common.errors import UserError
from pat_jax.common.files import replace_text
from pat_jax.common.text_table import Cell, percent, text_table
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.rl.evaluation import Evaluated, report
from pat_jax.rl.pass_at_k import Estimate
from pat_jax.run.completions import COMPLETIONS_FILE
from pat_jax.run.evaluation import Evaluation
from pat_jax.run.folder import LOG_FILE, log_to

RESULTS_FILE = "results.json"
TOTAL = "all"


def check_folder(name: str) -> None:
    """Raises UserError where results would be written over others."""
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"option --out is {name!r}: expected a new or empty folder; choose another."
        )


class ResultFolder:
    """The folder of one evaluation, made when this is."""

    def __init__(self, config: EvaluateConfig):
        """
        Raises:
          UserError: it cannot be made.
        """
        self.config, self.path = config, Path(config.out)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            log_to(self.path / LOG_FILE)
        except OSError as error:
            raise UserError(
                f"option --out is {config.out!r}: expected a folder that can be written "
                f"({error.strerror}); choose another."
            ) from None

    def write(self, found: Evaluation, left_out: Mapping[str, Mapping[str, int]]) -> str:
        """Writes the results.

        Args:
          left_out: problems, by set and reason.

        Returns:
          The same for people.
        """
        several = [*found.parts, found.total] if len(found.parts) > 1 else list(found.parts)
        ks, tokens = self.config.ks, int(found.total.lengths.sum())
        content: dict[str, Any] = {
            "pat_jax": __version__,
            "options": asdict(self.config),
            "seconds": found.seconds,
            "tokens_per_s": tokens / found.seconds,
            "sets": {
                one.name: {**report(one, ks), "left_out": left_out[one.name]} for one in found.parts
            },
            TOTAL: report(found.total, ks),
        }
        replace_text(self.path / RESULTS_FILE, json.dumps(content, indent=2, ensure_ascii=False))
        speed = (
            f"{tokens:,} tokens in {found.seconds:.1f} s, {tokens / found.seconds:,.0f} a second"
        )
        names = ", ".join((RESULTS_FILE, COMPLETIONS_FILE))
        return "\n".join([table(several, ks), "", speed, f"in {self.path}: {names}"])


def table(rows: Sequence[Evaluated], ks: Sequence[int]) -> str:
    """A line for each set of problems; ± is half of the 95 % interval."""
    n = rows[0].num_samples
    has_votes = any(one.majority() for one in rows)
    shown = [k for k in ks if k > 1 or any(_differ(one) for one in rows)]
    header = ["", "problems", "samples", "mean", *(f"pass@{k}" for k in shown)]
    header += [f"maj@{n}"] * has_votes + ["tokens", "truncated"]
    if has_failed := any(one.num_failed for one in rows):
        header.append("without reward")
    lines: list[list[Cell]] = []
    for one in rows:
        estimates = [one.mean(), *map(one.pass_at, shown)]
        estimates += [one.majority()] * has_votes
        line: list[Cell] = [one.name, len(one.rewards), n, *map(_words, estimates)]
        line += [float(one.lengths.mean()), percent(float(one.is_cut.mean()))]
        lines.append([*line, one.num_failed] if has_failed else line)
    return text_table(header, lines)


def _differ(one: Evaluated) -> bool:
    """Whether pass@1 is another number than the mean reward: rewards are not only 0 and 1."""
    return not ((one.rewards == 0) | (one.rewards == 1) | (one.rewards != one.rewards)).all()


def _words(estimate: Estimate | None) -> str:
    if estimate is None or not estimate.num_problems:
        return "-"
    if math.isnan(estimate.half_width):
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ± {estimate.half_width:.3f}"
