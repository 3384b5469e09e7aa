"""Numbers of a run's page: its tiles, what drafts gave, and rewards that failed."""

import re
from collections import Counter
from collections.abc import Iterator
from math import isfinite, nan

from pat_jax.common.html.page import html_table, listed, panels, section
from pat_jax.common.text_table import Table, percent, shown
from pat_jax.run.curves import Rows
from pat_jax.run.page.curves import curve, line_of, lines_plot, numbers

Fact = tuple[str, str]
SOURCES = {"": "all", "_own": "own text", "_siblings": "siblings", "_earlier": "earlier responses"}
_FAILED = re.compile(r"(?:reward(?:/(?P<name>.+))?/failed/(?P<cause>\w+))|eval/failed")


def facts(rows: Rows) -> Iterator[Fact]:
    """What a run is looked at for, as far as it is measured."""
    yield from _heldout(rows)
    tokens, rollout_s = numbers(rows, "rollout/tokens"), sum(numbers(rows, "timing/rollout"))
    if tokens and rollout_s:
        yield shown(sum(tokens) / rollout_s), "tokens/s of rollout, all devices together"
    if step_s := sum(numbers(rows, "timing/step")):
        yield percent(rollout_s / step_s), "of the steps' time is rollout"
    saved = numbers(rows, "rollout/predicted_saving_s")
    count = sum(numbers(rows, "rollout/switches"))
    if any(saved) or (saved and not count):  # of scripted switches nothing is predicted
        saved_s = sum(saved) - sum(numbers(rows, "rollout/switch_seconds"))
        many = f"{count:,.0f} switch{'' if count == 1 else 'es'}"
        yield f"{shown(saved_s)} s", f"saved by {many} of layout, as predicted, less what they took"


def _heldout(rows: Rows) -> Iterator[Fact]:
    for name in ("reward", "loss"):
        measured = [(x, y, half) for x, y, half in curve(rows, f"eval/{name}") if isfinite(y)]
        if not measured:
            continue
        (_, before, _), (step, now, half) = measured[0], measured[-1]
        interval = f", ± {half:.3f} (95 %)" if isfinite(half) else ""
        when = f"after step {step:.0f}{interval}"
        if len(measured) > 1:
            yield f"{before:.3f} → {now:.3f}", f"held-out {name} before and {when}"
        else:
            yield f"{now:.3f}", f"held-out {name} {when}"


def drafts(rows: Rows) -> str:
    """What drafts gave; empty where none were verified."""
    totals = [
        (source, *(sum(numbers(rows, f"rollout/{what}{key}")) for what in ("drafted", "accepted")))
        for key, source in SOURCES.items()
    ]
    if not totals[0][1]:
        return ""
    shares = {source: _acceptance(rows, key) for key, source in SOURCES.items()}
    lines = [
        line_of(source, points, i)
        for i, (source, points) in enumerate(shares.items())
        if any(isfinite(share) for _, share, _ in points)
    ]
    said = line_of("", curve(rows, "rollout/tokens_per_row_step"), 0)
    saved, predicted = (
        sum(numbers(rows, f"rollout/{name}"))
        for name in ("draft_saved_seconds", "predicted_draft_saving_s")
    )
    table = Table(
        ["drafts from", "tokens verified", "accepted", "acceptance"],
        [
            [source, int(verified), int(accepted), percent(accepted / verified)]
            for source, verified, accepted in totals
            if verified
        ],
    )
    return section(
        "Drafts",
        panels(
            [
                lines_plot(lines, rows, "acceptance: tokens of drafts, share of those verified"),
                lines_plot([said], rows, "tokens of a sequence in a decode step"),
            ]
        ),
        html_table(table),
        source=f"Saved {shown(saved)} s against what the planner believes of steps without; "
        f"{shown(predicted)} s were expected.",
    )


def _acceptance(rows: Rows, key: str) -> list[tuple[float, float, float]]:
    """The share of each step; a gap where nothing was drafted."""
    drafted = {step: value for step, value, _ in curve(rows, f"rollout/drafted{key}")}
    accepted = curve(rows, f"rollout/accepted{key}")
    return [
        (step, said / drafted[step] if drafted.get(step) else nan, nan)
        for step, said, _ in accepted
    ]


def failed_rewards(rows: Rows) -> str:
    """Responses that could not be scored, by cause; empty before the first step."""
    counts, newest = Counter[str](), dict[str, int]()
    for row in rows:
        for name in row:
            if (match := _FAILED.fullmatch(name)) and (few := sum(numbers([row], name))):
                told = _failure(match)
                counts[told] += int(few)
                newest[told] = row["step"]
    if not any("reward/failed" in row for row in rows):
        return ""
    if not counts:
        return section("Rewards that failed", listed(["None: each response has a reward."]))
    table = [[told, count, newest[told]] for told, count in counts.most_common()]
    return section(
        "Rewards that failed",
        html_table(Table(["cause", "responses", "last in step"], table)),
        source="A response without a reward teaches nothing. run.log tells why.",
    )


def _failure(match: re.Match[str]) -> str:
    if match["cause"] is None:
        return "held-out, any cause"
    cause = match["cause"].replace("_", " ")
    return f"{match['name']}: {cause}" if match["name"] else cause
