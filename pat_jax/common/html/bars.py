"""Bar charts of an HTML page: boxes of CSS, with words of text that never shrinks."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

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
    return f'<div class="bars">{"".join(lines)}{noted(note)}</div>{legend(keys)}'


def _share(value: float, most: float) -> str:
    return f"{100 * value / most:.2f}%"


def noted(note: str) -> str:
    """What stands inside a chart, such as that it is computed."""
    return f'<p class="note">{escape(note)}</p>' if note else ""


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
