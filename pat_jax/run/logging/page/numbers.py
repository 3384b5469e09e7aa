"""Numbers of a run's page: its tiles, and rewards that failed."""

import re
from collections import Counter
from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple, get_args

from pat_jax.common.text_table import Table, percent, shown
from pat_jax.planning.placement import PlacementName
from pat_jax.planning.placement_seconds import described
from pat_jax.run.logging.page.curves import curve, numbers
from pat_jax.run.logging.page.panels import Rows, number, with_derived


class Fact(NamedTuple):
    value: str
    words: str  # the same for all runs
    more: str = ""  # words that differ


SAVED, PREDICTED = "rollout/draft_saved_seconds", "rollout/predicted_draft_saving_s"
_FAILED = re.compile(r"(?:reward(?:/(?P<name>.+))?/failed/(?P<cause>\w+))|eval/failed")


def total(rows: Rows, name: str) -> float:
    return sum(numbers(rows, name))


def facts(rows: Rows) -> Iterator[Fact]:
    """Yields the main numbers of a run, as far as they were measured."""
    yield from _heldout(rows)
    yield from _speed([with_derived(row) for row in rows])
    saved = numbers(rows, "rollout/predicted_saving_s")
    count = total(rows, "rollout/switches")
    if any(saved):  # scripted switches have no predicted saving
        saved_s = sum(saved) - total(rows, "rollout/switch_seconds")
        many = f": {count:,.0f}, as predicted, less what they took"
        yield Fact(f"{shown(saved_s)} s", "saved by switches of layout", many)
    if total(rows, "rollout/drafted"):
        predicted = f", by the planner's estimate; {shown(total(rows, PREDICTED))} s predicted"
        yield Fact(f"{shown(total(rows, SAVED))} s", "saved by drafts", predicted)


def _speed(rows: Rows) -> Iterator[Fact]:
    """Yields seconds and tokens per second; neither counts waits for compilation."""
    tokens = total(rows, "rollout/tokens")
    speeds = [(row.get("rollout/tokens"), row.get("rollout/tokens_per_s")) for row in rows]
    decoding_s = sum(number(some) / number(speed) for some, speed in speeds if some and speed)
    if tokens and decoding_s > 0:
        yield Fact(shown(tokens / decoding_s), "tokens/s of rollout", ", all devices together")
    if step_s := total(rows, "seconds/step"):
        compile_s = total(rows, "beside/compile")
        compiling = f", beside {shown(compile_s)} s of compiling" if compile_s else ""
        yield Fact(f"{shown(step_s)} s", "time of steps", compiling)
        if rollout_s := total(rows, "seconds/rollout"):
            yield Fact(percent(rollout_s / step_s), "of the steps' time is rollout")


def placements(rows: Rows) -> str:
    """Returns a line on the predicted seconds of other placements; empty if none were compared."""
    names = {name: f"placement/{name}" for name in get_args(PlacementName)}
    found = {name: row[key] for row in rows for name, key in names.items() if key in row}
    return described(found) if found else ""


def _heldout(rows: Rows) -> Iterator[Fact]:
    for name in ("reward", "loss", "accuracy"):
        measured = [(x, y, half) for x, y, half in curve(rows, f"eval/{name}") if isfinite(y)]
        if not measured:
            continue
        _, before, _ = measured[0]
        step, now, half = measured[-1]
        interval = f", ± {half:.3f} (95 %)" if isfinite(half) else ""
        when = f"after step {step:.0f}{interval}"
        if len(measured) > 1:
            yield Fact(f"{before:.3f} → {now:.3f}", f"held-out {name}", f" before and {when}")
        else:
            yield Fact(f"{now:.3f}", f"held-out {name}", f" {when}")


def failed_rewards(rows: Rows) -> Table:
    """Returns a table of responses that could not be scored, the most frequent cause first."""
    counts = Counter[str]()
    newest = dict[str, int]()
    for row in rows:
        for name in row:
            if (match := _FAILED.fullmatch(name)) and (few := total([row], name)):
                cause = _cause(match)
                counts[cause] += int(few)
                newest[cause] = row["step"]
    table = [[cause, count, newest[cause]] for cause, count in counts.most_common()]
    return Table(["cause", "responses", "last in step"], table)


def _cause(match: re.Match[str]) -> str:
    if match["cause"] is None:
        return "held-out, any cause"
    cause = match["cause"].replace("_", " ")
    return f"{match['name']}: {cause}" if match["name"] else cause
