"""A profile for people: tables of text and a picture."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pat_jax.common.picture_style import tp_colour
from pat_jax.planning.latency.profile import Profile
from pat_jax.planning.types import Split

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tables(profile: Profile) -> str:
    """What was measured, in as many lines as it needs; milliseconds."""
    latency = profile.latency
    parts = [_origin(profile), _decode_table(latency.decode_table)]
    parts += [
        _list(
            f"prefill, one call of {latency.prefill_blocks} pages of {latency.page_size} tokens",
            latency.prefill_table,
            _call,
        ),
        _list("re-slice all weights", latency.reslice_table, _pair),
        _list(f"migrate {latency.round_tokens} tokens a group", latency.migrate_table, _round),
        _list("collectives", profile.collectives, _collective),
        _list("compilation", profile.compile_s, str),
    ]
    return "\n\n".join(part for part in parts if part)


def _origin(profile: Profile) -> str:
    if not profile.shards_of:
        return ""
    return (
        f"one device measured, with the shards of {profile.shards_of}; collectives, re-slices and "
        "migrations are computed from its links and memory"
    )


def _decode_table(table: Mapping[tuple[Split, int, int], float]) -> str:
    """One line for each cache length and number of sequences, one column for each layout."""
    splits = list(dict.fromkeys(split for split, _, _ in table))
    loads = sorted({(length, rows * split.dp) for split, rows, length in table})
    lines = [
        "decode, ms a step",
        f"{'cache':>8} {'live':>6}" + "".join(f"{s!s:>12}" for s in splits),
    ]
    for length, live in loads:
        cells = [table.get((s, live // s.dp, length)) if live % s.dp == 0 else None for s in splits]
        known = [x for x in cells if x is not None]
        marked = (
            f"{'' if x is None else f'{1e3 * x:.2f}' + ('*' if x == min(known) else ' '):>12}"
            for x in cells
        )
        lines.append(f"{length:>8} {live:>6}" + "".join(marked))
    return "\n".join([*lines, "* the quickest layout of the line"])


def _list(title: str, table: Mapping, name) -> str:
    if not table:
        return ""
    return "\n".join(
        [f"{title}, ms", *(f"{name(key):>34} {1e3 * s:10.2f}" for key, s in table.items())]
    )


def _call(key: tuple[Split, int]) -> str:
    return f"{key[0]} cache {key[1]}"


def _pair(key: tuple[Split, Split]) -> str:
    return f"{key[0]} -> {key[1]}"


def _round(key: tuple[Split, Split, str]) -> str:
    source, target, senders = key
    if source == target:
        return f"{source}, between its groups"
    return f"{_pair((source, target))}, {senders} sending"


def _collective(key: tuple[str, int, int]) -> str:
    return f"{key[0]} of {key[1]}, {key[2] // 1024} KiB"


def plot_profile(profile: Profile, path: Path) -> None:
    """Writes what `draw_profile` draws (PNG)."""
    draw_profile(profile).savefig(path)


def draw_profile(profile: Profile) -> "Figure":
    """The decode step by live sequences, a panel for each cache length."""
    from pat_jax.common.picture import Picture

    table = profile.latency.decode_table
    lengths = sorted({length for _, _, length in table})
    figure = Picture(4.2 * len(lengths) + 0.6, 3.6)
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for axes, length in zip(panels, lengths, strict=True):
        for split in dict.fromkeys(split for split, _, _ in table):
            live, seconds = _line(table, split, length)
            options = {"label": str(split), "color": tp_colour(split.tp)}
            axes.plot(live, seconds, marker="o", markersize=3, **options)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"cache of {length:,} tokens", loc="left", fontsize=10)
        axes.set_xlabel("live sequences, evenly over the groups")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ms a decode step")
    panels[-1].legend(frameon=False)
    subject = profile.subject
    figure.suptitle(f"{subject.num_devices} x {subject.device_kind}, {subject.dtype}", fontsize=10)
    return figure


def _line(table: Mapping, split: Split, length: int) -> tuple[Sequence[int], Sequence[float]]:
    points: Iterable = sorted(
        (r * split.dp, 1e3 * s) for (a, r, n), s in table.items() if (a, n) == (split, length)
    )
    live, seconds = zip(*points, strict=True)
    return live, seconds
