"""Charts: their values, and where each point is drawn. `macros.html.jinja` draws them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, floor, isfinite, log10

COMPUTED = "computed, not measured"  # in a picture of a plan or a replay

# Colour-blind people can tell them apart (Okabe and Ito 2008), on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f7f7f")


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def tp_colour(tp: int) -> str:
    """Returns the colour of layouts with this TP degree, the same in every picture. It depends on
    the degree's number of prime factors, as each wider layout adds a mesh axis."""
    count = 0
    factor = 2
    while tp > 1:
        if tp % factor:
            factor += 1
        else:
            tp = tp // factor
            count = count + 1
    return colour(count)


def layout_colour(name: str) -> str:
    """Returns the colour of a layout by its name, such as `dp2tp4`."""
    return tp_colour(int(name.rpartition("tp")[2]))


Points = Sequence[tuple[float, ...]]
Size = tuple[float, float]  # width and height


@dataclass(frozen=True)
class Line:
    name: str
    points: Points  # x and y; a point that is not finite leaves a gap
    colour: str
    is_step: bool = False  # horizontal between points, with steps at them
    is_dotted: bool = False  # each point has a marker
    is_filled: bool = False  # the area below is pale; its bottom is at the first and the last point
    interval: Points = ()  # x, low and high of an interval around the line


@dataclass(frozen=True)
class Band:
    """A shaded range of the horizontal axis. Its name may be empty."""

    name: str
    left: float
    right: float
    colour: str
    opacity: float = 0.18


@dataclass(frozen=True)
class Axis:
    """Maps numbers to percent: 0 is the left or the bottom, 100 the right or the top."""

    low: float
    high: float
    is_log: bool = False
    is_whole: bool = False  # ticks are whole numbers

    @classmethod
    def over(cls, values: Sequence[float], *, is_log: bool = False) -> "Axis":
        """Returns an axis for these values. Unless it is logarithmic, it includes 0."""
        low = min(values) if is_log else min(0.0, *values)
        high = max(values) if is_log else max(0.0, *values)
        return cls(low, high if high > low else low + 1, is_log)

    def at(self, value: float) -> float:
        if self.is_log:
            return round(100 * log10(value / self.low) / log10(self.high / self.low), 3)
        return round(100 * (value - self.low) / (self.high - self.low), 3)

    def width(self, left: float, right: float) -> float:
        return round(self.at(right) - self.at(left), 3)

    def ticks(self) -> list[tuple[float, str]]:
        """Returns about four ticks at round numbers: the place of each in percent, and its text."""
        return [(self.at(number), _short(number)) for number in self._round_numbers()]

    def _round_numbers(self) -> list[float]:
        if self.is_log:
            first = ceil(log10(self.low) - 1e-9)
            last = floor(log10(self.high) + 1e-9)
            every = max(1, (last - first) // 3)
            decades = [10.0**k for k in range(first, last + 1, every)]
            return decades if len(decades) > 1 else [self.low, self.high]
        raw = (self.high - self.low) / 4
        unit = 10 ** floor(log10(raw))
        step = next(n * unit for n in (1, 2, 2.5, 5, 10) if n * unit >= raw)
        step = max(1.0, round(step)) if self.is_whole else step
        first = ceil(self.low / step - 1e-9)
        last = floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class Plot:
    """Lines over shaded bands, as SVG paths in an area of a given size. y points up."""

    lines: Sequence[Line]
    across: Axis
    up: Axis
    across_words: str
    up_words: str
    bands: Sequence[Band] = ()
    marks: Sequence[float] = ()  # events, as values on the horizontal axis
    note: str = COMPUTED  # text inside the plot
    title: str = ""  # only for a picture outside of a page

    @property
    def colours(self) -> dict[str, str]:
        return {each.name: each.colour for each in (*self.lines, *self.bands) if each.name}

    def path(self, line: Line, size: Size) -> str:
        """Returns the path of a line, with a subpath for each part between gaps."""
        found = []
        for first, *rest in self._parts(line.points, size):
            found.append("M{} {}".format(*first) + ("" if rest else "h0"))
            found += [("H{}V{}" if line.is_step else "L{} {}").format(*point) for point in rest]
        return "".join(found)

    def dots(self, line: Line, size: Size) -> str:
        return "".join(f"M{x} {y}h0" for part in self._parts(line.points, size) for x, y in part)

    def spread(self, line: Line, size: Size) -> Iterator[str]:
        """Yields the area of the interval around a line, a path for each part between gaps."""
        for part in self._parts(line.interval, size):
            upper = [(x, high) for x, _, high in part]
            lower = [(x, low) for x, low, _ in reversed(part)]
            yield f"M{'L'.join(f'{x} {y}' for x, y in (*upper, *lower))}Z"

    def _parts(self, points: Points, size: Size) -> Iterator[list[tuple[float, ...]]]:
        """Yields the points of each part between gaps, scaled to an area of this size."""
        width, height = size
        for is_known, part in groupby(points, key=lambda point: all(map(isfinite, point))):
            if is_known:
                yield [
                    (
                        round(self.across.at(x) * width / 100, 3),
                        *(round(self.up.at(y) * height / 100, 3) for y in heights),
                    )
                    for x, *heights in part
                ]
