"""Pictures of the layouts that rollouts were in: of one over time, of many over the steps of a run."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from pat_jax.common.html.bars import legend
from pat_jax.common.html.plots import Axis, Band, Line, Points, drawing, plot
from pat_jax.common.picture_style import COMPUTED, colour, layout_colour

MOST_COLUMNS = 400  # of a ribbon; of more steps several share one
_LAYOUT = re.compile(r"dp[1-9]\d{0,5}tp[1-9]\d{0,5}")

Path = tuple[str, ...]  # of layouts, one after the other


def live_plot(
    live: Points,
    edges: Sequence[float],
    layouts: Sequence[str],
    switches: Sequence[float],
    *,
    note: str = COMPUTED,
) -> str:
    """Live sequences over time, and the layout in force.

    Args:
      live: seconds, and sequences from there on.
      edges: seconds at which each burst begins, and the last one ends.
      layouts: of each burst.
      switches: when there were some.
    """
    prefill = [("prefill", colour(6))] if edges[0] > 0 else []
    bands, start = [Band(name, 0, edges[0], grey) for name, grey in prefill], 0
    for layout, bursts in groupby(layouts):
        stop = start + len(list(bursts))
        bands.append(Band(layout, edges[start], edges[stop], layout_colour(layout)))
        start = stop
    drawn = plot(
        [Line("", live, "currentColor", is_step=True)],
        across=Axis.over(edges),
        up=Axis.over([count for _, count in live]),
        across_words="seconds since the rollout began",
        up_words="live sequences, and the layout in force",
        bands=bands,
        marks=switches,
        note=note,
    )
    return drawn + legend([*prefill, *_keys(layouts)])


def _keys(layouts: Iterable[str]) -> list[tuple[str, str]]:
    """Names and their colours, least TP first."""
    names = sorted(set(layouts), key=lambda name: int(name.rpartition("tp")[2]))
    return [(name, layout_colour(name)) for name in names]


def read_path(text: object) -> Path:
    """Of a text such as `dp2tp1 -> dp1tp2`; of what is none nothing."""
    names = text.split(" -> ") if isinstance(text, str) else []
    return tuple(names) if all(map(_LAYOUT.fullmatch, names)) else ()


def ribbon(paths: Sequence[tuple[int, Path]], across: Axis) -> str:
    """Over the steps, the layouts that the rollout of each was in: the first at the bottom.

    Args:
      paths: of steps, which count from 1.
    """
    shapes = []
    for left, right, path in _columns(paths):
        x, width = 100 * across.at(left), 100 * (across.at(right) - across.at(left))
        height = 100 / len(path)
        shapes += [
            f'<rect x="{x:.3f}" y="{100 - (i + 1) * height:.2f}" width="{width:.3f}" '
            f'height="{height:.2f}" fill="{layout_colour(name)}"><title>{name}</title></rect>'
            for i, name in enumerate(path)
        ]
    return (
        "<figure><figcaption>layouts of each rollout, the first at the bottom; heights are no times"
        "</figcaption>"
        f'{drawing(shapes, across, kind="plot ribbon")}<p class="across">step</p>'
        f"{legend(_keys(name for _, path in paths for name in path))}</figure>"
    )


def _columns(paths: Sequence[tuple[int, Path]]) -> Iterator[tuple[int, int, Path]]:
    """Where steps of one path begin and end; of very many steps the path of most."""
    each = -(-len(paths) // MOST_COLUMNS)
    columns = []
    for start in range(0, len(paths), each or 1):
        few = paths[start : start + each]
        ((path, _),) = Counter(path for _, path in few).most_common(1)
        columns.append((few[0][0] - 1, few[-1][0], path))
    merged: list[tuple[int, int, Path]] = []
    for left, right, path in columns:
        if merged and merged[-1][1:] == (left, path):
            left, *_ = merged.pop()
        merged.append((left, right, path))
    yield from merged
