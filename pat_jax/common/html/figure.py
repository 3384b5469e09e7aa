"""A picture of charts and words: one SVG, for a file or a cell of a notebook.

Its charts are drawn as those of a page are (`macros.html.jinja`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from pat_jax.common.files import replace_text
from pat_jax.common.html.charts import Plot
from pat_jax.common.html.render import rendered

TEMPLATE = Path(__file__).with_name("figure.svg.jinja")
EDGE = 10  # margin around the picture; all lengths here are in pixels
LEFT = 50  # space left of a plot's area, for the numbers of its vertical axis
RIGHT = 14  # space right of an area, for half of the last number below it
ABOVE = 24  # space above an area, for the numbers of its marks
BELOW = 40  # space below an area, for its horizontal axis
LINE = 18  # from one line of words to the next
LETTER = 6.6  # more than the mean width of a letter
KEY = 34  # width of a legend's entry beside its name: the colour, and space to the next entry


@dataclass(frozen=True)
class Box:
    """A plot with its position and size in a picture."""

    plot: Plot
    x: float
    y: float
    width: float
    height: float  # of the plot's area, without axis and legend

    @property
    def size(self) -> tuple[float, float]:
        """The width and height of the plot's area."""
        return self.width - LEFT - RIGHT, self.height

    @property
    def area_y(self) -> float:
        """Distance from the top of the box to the plot's area."""
        return LINE * (1 + bool(self.plot.title)) + ABOVE

    @property
    def keys(self) -> list[tuple[str, str, float, float]]:
        """The entries of the legend: name, colour, and x and y within the box."""
        names = self.plot.colours
        below = self.area_y + self.height + BELOW + LINE
        across = KEY + LETTER * max(map(len, names), default=0)
        columns = max(1, int((self.width - LEFT) / across))
        return [
            (name, colour, LEFT + across * (i % columns), below + LINE * (i // columns))
            for i, (name, colour) in enumerate(names.items())
        ]

    @property
    def bottom(self) -> float:
        end = self.area_y + self.height + BELOW
        return self.y + max([end, *(y for *_, y in self.keys)]) + LINE


@dataclass(frozen=True)
class Figure:
    """Plots in rows, with lines of words under them. A notebook shows it as a picture."""

    plots: Sequence[Plot]
    columns: int = 1
    width: int = 900  # of a plot with the words at its axes
    height: int = 240  # of a plot's area
    told: Sequence[str] = ()  # the lines of words

    @property
    def boxes(self) -> list[Box]:
        found: list[Box] = []
        for i, plot in enumerate(self.plots):
            column = i % self.columns
            if column == 0:
                y = max((box.bottom for box in found), default=EDGE)
            found.append(Box(plot, EDGE + column * self.width, y, self.width, self.height))
        return found

    def lines(self) -> Iterator[str]:
        """Yields the words under the plots, each line as long as the picture is wide."""
        for line in self.told:
            yield from wrap(line, int(self.columns * self.width / LETTER))

    def svg(self) -> str:
        boxes = self.boxes
        lines = [*self.lines()]
        bottom = max((box.bottom for box in boxes), default=EDGE)
        return rendered(
            TEMPLATE,
            boxes=boxes,
            lines=[(bottom + LINE * i, line) for i, line in enumerate(lines, start=1)],
            width=self.columns * self.width + 2 * EDGE,
            height=bottom + LINE * len(lines) + EDGE,
            left=LEFT,
            right=RIGHT,
            edge=EDGE,
        )

    def save(self, path: str | Path) -> None:
        """Writes the picture to a file; its folder is made if missing."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, self.svg())

    def _repr_svg_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        return "\n".join([*(plot.title or plot.up_words for plot in self.plots), *self.told])
