"""Shows the progress of a run: a bar, or one line a step if none can be shown.

Knows which metrics are worth a glance. Does not know how they are measured or stored.
"""

import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from typing import Any, TextIO

from pat_jax.common.bars import bar, is_cell
from pat_jax.common.errors import printable

log = logging.getLogger(__name__)


class Progress:
    """The bar of a run of `total` steps."""

    def __init__(self, total: int, *, stream: TextIO | None = None):
        # In a notebook, stderr looks like a failure.
        self._stream = stream or (sys.stdout if is_cell(sys.stdout) else sys.stderr)
        self._total = total
        self._is_cell = is_cell(self._stream)
        width = "" if self._is_cell else ":16"
        self._bar = bar(
            total=total,
            file=self._stream,
            disable=not (self._is_cell or self._stream.isatty()),
            bar_format=f"{{n_fmt}}/{{total_fmt}} |{{bar{width}}}| {{elapsed}}<{{remaining}} {{desc}}",
        )

    def start(self, done: int) -> None:
        """Restarts the bar's clock when steps begin, with `done` steps done: the time before them
        does not count."""
        self._bar.reset()
        self._bar.initial = self._bar.n = self._bar.last_print_n = done

    def stage(self, text: str) -> None:
        """Shows what is going on within a step, such as `rollout dp2tp1 running 12` (bars only)."""
        self._bar.set_description_str(printable(text))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows that `step` (counted from 1) is done, and its metrics."""
        line = f"step {step:>{len(str(self._total))}}/{self._total}  {describe(metrics)}"
        log.info("%s", line)
        if self._is_cell:  # only the newest step: a notebook keeps every printed line
            self._bar.set_description_str(describe(metrics), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        self.print(line if self._bar.disable else wrapped(line, get_terminal_size().columns))
        self._bar.set_description_str("", refresh=False)
        self._bar.update(step - self._bar.n)

    def print(self, text: str) -> None:
        """Prints a line above the bar. Control characters are escaped, as it may quote a policy."""
        text = printable(text)
        if self._bar.disable or self._is_cell:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        if not self._is_cell:  # in a notebook the bar stays, with the last step's metrics
            self._bar.set_description_str("", refresh=False)
        self._bar.close()


# Fixed widths, so that steps are aligned in columns.
_OF_ROLLOUTS = {
    "reward/mean": "reward {:6.3f}",
    "train/loss": "loss {:7.4f}",
    "train/behavior_gap": "logprob gap {:.0e}",
    "rollout/length_p50": "length p50 {:5.0f}",
    "rollout/length_max": "max {:5.0f}",
    "rollout/tokens_per_s": "tok/s {:7,.0f}",
}
_OF_EXAMPLES = {
    "progress/epoch": "epoch {:5.2f}",
    "train/loss": "loss {:7.4f}",
    "train/accuracy": "accuracy {:5.3f}",
    "train/grad_norm": "grad norm {:6.2f}",
    "train/tokens_per_s": "tok/s {:7,.0f}",
}


def describe(metrics: Mapping[str, Any]) -> str:
    """Returns the metrics of one step in one line, without those that are missing or NaN."""
    templates = _OF_ROLLOUTS if "reward/mean" in metrics else _OF_EXAMPLES
    known = {name: x for name, x in metrics.items() if not (isinstance(x, float) and math.isnan(x))}
    parts = [text.format(known[name]) for name, text in templates.items() if name in known]
    if "reward/mean" in known and (names := _functions(known)):
        means = ", ".join(f"{name} {known[f'reward/{name}/mean']:.3f}" for name in names)
        parts[:1] = [f"{parts[0]} ({means})"]
    if stages := [f"{name} {seconds:6.2f}" for name, seconds in _stages(metrics).items()]:
        parts.append(f"{', '.join(stages)} s")
    if layouts := metrics.get("rollout/layouts"):
        parts.append(layouts)
    return "  ".join(parts)


def wrapped(line: str, columns: int) -> str:
    """Wraps a line at its double spaces, into lines of at most `columns` characters."""
    lines = [""]
    for part in re.split(r"  (?=[a-z])", line):
        if len(lines[-1]) + 2 + len(part) > columns and lines[-1]:
            lines.append(f"    {part}")
        else:
            lines[-1] = f"{lines[-1]}  {part}" if lines[-1] else part
    return "\n".join(lines)


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a summary of a run, from its metric rows, in a few lines."""
    num_steps = sum(row["step"] > 0 for row in rows)  # row 0 has the evaluation before the first
    is_imitation = any({"eval/loss", "train/tokens_in_loss"} & row.keys() for row in rows)
    goal = "loss" if is_imitation else "reward"
    scores = _values(rows, f"eval/{goal}")
    if not num_steps:
        first = (f"held-out {goal} {x:.3f}" for x in scores[:1])
        return "\n".join(["no step was finished", *first])
    totals: dict[str, float] = {}
    for row in rows:
        for stage, seconds in _stages(row).items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    whole = sum(totals.values())
    parts = sorted(totals.items(), key=lambda stage: -stage[1])
    split = ", ".join(
        f"{stage} {seconds / whole:.0%}" for stage, seconds in parts if seconds > 0 < whole
    )
    lines = [f"{_count(num_steps, 'step')} in {whole:,.1f} s" + (f": {split}" if split else "")]
    if values := _values(rows, "train/loss" if goal == "loss" else "reward/mean"):
        few = min(10, max(1, len(values) // 2))
        first = sum(values[:few]) / few
        last = sum(values[-few:]) / few
        span = f"mean of the first and last {few} steps" if few > 1 else "first and last step"
        lines.append(f"{goal} {first:.3f} -> {last:.3f} ({span})")
    earned = [_values(rows, f"reward/{name}") for name in ("mean", "std")]
    if all(earned) and not any(earned[0] + earned[1]):
        lines.append(f"nothing was rewarded in {_count(num_steps, 'step')}")
    lines += _failing(rows)
    if scores:
        lines.append(f"held-out {goal} {scores[0]:.3f} -> {scores[-1]:.3f}")
    if accuracies := _values(rows, "eval/accuracy"):
        lines.append(f"held-out accuracy {accuracies[0]:.3f} -> {accuracies[-1]:.3f}")
    if (tokens := _values(rows, "rollout/tokens")) and totals.get("rollout"):
        lines.append(f"{sum(tokens):,.0f} tokens, {sum(tokens) / totals['rollout']:,.0f} tok/s")
    if switches := sum(_values(rows, "rollout/switches")):
        cost = sum(_values(rows, "rollout/switch_seconds"))
        saving = sum(_values(rows, "rollout/predicted_saving_s"))
        times = f"cost {cost:.2f} s, predicted saving {saving:.2f} s"
        lines.append(f"{_count(switches, 'switch', 'switches')}: {times}")
    return "\n".join(lines)


def _failing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines on the steps and evaluations in which responses have no reward, and on the
    functions that scored none."""
    lines = []
    for unit, failed, mean in (
        ("step", "reward/failed", "reward/mean"),
        ("evaluation", "eval/failed", "eval/reward"),
    ):
        found = [row for row in rows if failed in row]
        if failing := sum(row[failed] > 0 for row in found):
            none = len(found) - len(_values(found, mean))
            of = f"{failing} of {_count(len(found), unit)}"
            lines.append(f"rewards failed in {of}, for all responses in {none}")
    steps = [row for row in rows if "reward/failed" in row]
    for name in dict.fromkeys(name for row in steps for name in _functions(row)):
        if none := len(steps) - len(_values(steps, f"reward/{name}/mean")):
            lines.append(f"{name} scored no response in {none} of {_count(len(steps), 'step')}")
    return lines


def _functions(metrics: Mapping[str, Any]) -> list[str]:
    """Returns the names of the reward functions, if there are several."""
    paths = [name.split("/") for name in metrics if name.startswith("reward/")]
    names = [path[1] for path in paths if len(path) == 3 and path[2] == "mean"]
    return names if len(names) > 1 else []


def _stages(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds of each stage. `timing/rollout` is a stage, `timing/rollout/switch` a
    part of one, and `timing/step` the whole step."""
    names = {name: name.split("/")[1:] for name in metrics if name.startswith("timing/")}
    names.pop("timing/step", None)
    stages = {name: path[0] for name, path in names.items() if len(path) == 1}
    return {stage: x for name, stage in stages.items() for x in _values([metrics], name)}


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Returns the values of a metric without NaN, which a mean is if nothing could be scored."""
    found = (row.get(name) for row in rows)
    return [x for x in found if isinstance(x, int | float) and not math.isnan(x)]


def _count(number: float, one: str, many: str = "") -> str:
    return f"{number:,.0f} {one if number == 1 else many or one + 's'}"
