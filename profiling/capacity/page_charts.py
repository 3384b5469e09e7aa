"""Charts of an HTML page: inline SVG for lines, boxes of CSS for bars, text that never shrinks.

A chart's lines are stretched to the width of the page, while its words are HTML placed beside them:
they stay readable at any width, offline, without a script.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from pat_jax.common.picture_style import COMPUTED


@dataclass(frozen=True)
class Segment:
    name: str
    value: float
    colour: str


@dataclass(frozen=True)
class Bar:
    """One line of a bar chart."""

    name: str
    segments: Sequence[Segment]
    words: str  # beside the bar


def bars(
    rows: Sequence[Bar], *, limit: float = 0.0, limit_words: str = "", note: str = COMPUTED
) -> str:
    """Stacked bars of one scale, with a legend and a note; `limit` is marked in each."""
    most = max([limit, *(sum(s.value for s in row.segments) for row in rows)]) or 1.0
    names = dict.fromkeys((s.name, s.colour) for row in rows for s in row.segments)
    mark = f'<i class="limit" style="left:{_share(limit, most)}"></i>' if limit else ""
    lines = [
        f'<div class="bar"><b>{escape(row.name)}</b><span class="track">'
        + "".join(
            f'<i style="width:{_share(s.value, most)};background:{s.colour}" '
            f'title="{escape(s.name)} {s.value:.3g}"></i>'
            for s in row.segments
        )
        + f"{mark}</span><em>{escape(row.words)}</em></div>"
        for row in rows
    ]
    keys = [*names, (limit_words, "")] if limit else list(names)
    return f'<div class="bars">{"".join(lines)}{_noted(note)}</div>{legend(keys)}'


def _noted(note: str) -> str:
    return f'<p class="note">{escape(note)}</p>'


def _share(value: float, most: float) -> str:
    return f"{100 * value / most:.2f}%"


def legend(keys: Sequence[tuple[str, str]]) -> str:
    """Names and their colours; one without a colour is that of a limit."""
    return (
        '<p class="legend">'
        + "".join(
            f'<span><i class="{"key" if c else "key mark"}" style="background:{c}"></i>'
            f"{escape(name)}</span>"
            for name, c in keys
        )
        + "</p>"
    )


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    is_step: bool = False  # from point to point it stays as high as it was


@dataclass(frozen=True)
class Band:
    """A part of the horizontal axis, with a name."""

    name: str
    left: float
    right: float
    colour: str


@dataclass(frozen=True)
class Axis:
    """Where a number lies: 0 at the left or the bottom, 1 at the right or the top."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], *, is_log: bool = False) -> "Axis":
        low, high = (min(values), max(values)) if is_log else (0.0, max(values))
        return cls(low, high if high > low else low + 1, is_log)

    def at(self, value: float) -> float:
        if self.is_log:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers, four or so."""
        if self.is_log:
            first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
            every = max(1, (last - first) // 3)
            decades = [10.0**k for k in range(first, last + 1, every)]
            return decades if len(decades) > 1 else [self.low, self.high]
        raw = (self.high - self.low) / 4
        unit = 10 ** floor(log10(raw))
        step = next(n * unit for n in (1, 2, 2.5, 5, 10) if n * unit >= raw)
        count = int((self.high - self.low) / step + 1e-9)
        return [self.low + i * step for i in range(count + 1)]


def plot(
    lines: Sequence[Line],
    *,
    across: Axis,
    up: Axis,
    across_words: str,
    up_words: str,
    bands: Sequence[Band] = (),
    marks: Sequence[float] = (),
    note: str = COMPUTED,
) -> str:
    """Lines over shaded bands, with a note; vertical marks where something happens."""
    shapes = [
        f'<rect x="{100 * across.at(band.left):.3f}" y="0" '
        f'width="{100 * (across.at(band.right) - across.at(band.left)):.3f}" height="100" '
        f'fill="{band.colour}" opacity=".18"/>'
        for band in bands
    ]
    shapes += [
        f'<line x1="0" x2="100" y1="{100 - 100 * up.at(y):.2f}" y2="{100 - 100 * up.at(y):.2f}" '
        'class="grid"/>'
        for y in up.ticks()
    ]
    shapes += [_line(line, across, up) for line in lines]
    shapes += [
        f'<line x1="{100 * across.at(x):.3f}" x2="{100 * across.at(x):.3f}" y1="0" y2="100" '
        'class="when"/>'
        for x in marks
    ]
    words = [
        f'<span class="tick x" style="left:{100 * across.at(x):.2f}%">{_short(x)}</span>'
        for x in across.ticks()
    ]
    words += [
        f'<span class="tick y" style="bottom:{100 * up.at(y):.2f}%">{_short(y)}</span>'
        for y in up.ticks()
    ]
    words += [
        f'<span class="band" style="left:{100 * across.at(band.left):.2f}%;'
        f'width:{100 * (across.at(band.right) - across.at(band.left)):.2f}%">{escape(band.name)}</span>'
        for band in bands
        if across.at(band.right) - across.at(band.left) > 0.15
    ]
    keys = [(line.name, line.colour) for line in lines if line.name]
    return (
        f'<figure><figcaption>{escape(up_words)}</figcaption><div class="plot">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(shapes)}</svg>{''.join(words)}{_noted(note)}</div>"
        f'<p class="across">{escape(across_words)}</p>{legend(keys) if keys else ""}</figure>'
    )


def _line(line: Line, across: Axis, up: Axis) -> str:
    at = [(100 * across.at(x), 100 - 100 * up.at(y)) for x, y in line.points]
    path = [f"M{at[0][0]:.3f} {at[0][1]:.3f}"]
    for x, y in at[1:]:
        path.append(f"H{x:.3f}V{y:.3f}" if line.is_step else f"L{x:.3f} {y:.3f}")
    return f'<path d="{"".join(path)}" stroke="{line.colour}" class="line"/>'


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
