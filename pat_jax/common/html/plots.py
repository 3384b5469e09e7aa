"""Plots of an HTML page: inline SVG for lines, HTML beside them for words.

A plot's lines are stretched to the width of the page, and its words are not: they stay readable at
any width, offline, without a script.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, isfinite, log10

from pat_jax.common.html.bars import legend, noted
from pat_jax.common.picture_style import COMPUTED

Points = Sequence[tuple[float, ...]]


@dataclass(frozen=True)
class Line:
    name: str
    points: Points  # x and y; one that is not finite leaves a gap
    colour: str
    is_step: bool = False  # from point to point it stays as high as it was
    is_dotted: bool = False  # each point is marked
    spread: Points = ()  # x, low and high of an interval around the line


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
    is_whole: bool = False  # ticks are whole numbers

    @classmethod
    def over(cls, values: Sequence[float], *, is_log: bool = False) -> "Axis":
        """Has 0 on it, where it is not logarithmic."""
        low = min(values) if is_log else min(0.0, *values)
        high = max(values) if is_log else max(0.0, *values)
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
        step = max(1.0, round(step)) if self.is_whole else step
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


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
    shapes += [shape for line in lines for shape in _shapes(line, across, up)]
    shapes += [
        f'<line x1="{100 * across.at(x):.3f}" x2="{100 * across.at(x):.3f}" y1="0" y2="100" '
        'class="when"/>'
        for x in marks
    ]
    words = [
        f'<span class="tick y" style="bottom:{100 * up.at(y):.2f}%">{_short(y)}</span>'
        for y in up.ticks()
    ]
    words += [
        f'<span class="band" style="left:{100 * across.at(band.left):.2f}%;'
        f'width:{100 * (across.at(band.right) - across.at(band.left)):.2f}%">'
        f"{escape(band.name)}</span>"
        for band in bands
        if across.at(band.right) - across.at(band.left) > 0.15
    ]
    keys = [(line.name, line.colour) for line in lines if line.name]
    return (
        f"<figure><figcaption>{escape(up_words)}</figcaption>"
        f"{drawing(shapes, across, words=[*words, noted(note)])}"
        f'<p class="across">{escape(across_words)}</p>{legend(keys) if keys else ""}</figure>'
    )


def drawing(
    shapes: Sequence[str], across: Axis, *, words: Sequence[str] = (), kind: str = "plot"
) -> str:
    """Shapes of SVG, in a square of 100 that is stretched, over the ticks of their axis."""
    ticks = "".join(
        f'<span class="tick x" style="left:{100 * across.at(x):.2f}%">{_short(x)}</span>'
        for x in across.ticks()
    )
    return (
        f'<div class="{kind}"><svg viewBox="0 0 100 100" preserveAspectRatio="none" '
        f'aria-hidden="true">{"".join(shapes)}</svg>{ticks}{"".join(words)}</div>'
    )


def _shapes(line: Line, across: Axis, up: Axis) -> Iterator[str]:
    """What a line is drawn with; a part between gaps is a part of its path."""

    def at(x: float, y: float) -> tuple[float, float]:
        return 100 * across.at(x), 100 - 100 * up.at(y)

    for part in _parts(line.spread):
        upper = [at(x, high) for x, _, high in part]
        lower = [at(x, low) for x, low, _ in reversed(part)]
        edge = "L".join(f"{x:.3f} {y:.3f}" for x, y in (*upper, *lower))
        yield f'<path d="M{edge}Z" fill="{line.colour}" class="spread"/>'
    path = []
    for part in _parts(line.points):
        x, y = at(*part[0])
        path.append(f"M{x:.3f} {y:.3f}" + ("h0" if len(part) == 1 else ""))
        for x, y in (at(*point) for point in part[1:]):
            path.append(f"H{x:.3f}V{y:.3f}" if line.is_step else f"L{x:.3f} {y:.3f}")
    if path:
        yield f'<path d="{"".join(path)}" stroke="{line.colour}" class="line"/>'
    if line.is_dotted:
        dots = (at(*point) for part in _parts(line.points) for point in part)
        drawn = "".join(f"M{x:.3f} {y:.3f}h0" for x, y in dots)
        yield f'<path d="{drawn}" stroke="{line.colour}" class="dots"/>'


def _parts(points: Points) -> Iterator[list[tuple[float, ...]]]:
    """The points between gaps."""
    part: list[tuple[float, ...]] = []
    for point in points:
        if all(map(isfinite, point)):
            part.append(point)
        elif part:
            yield part
            part = []
    if part:
        yield part


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
