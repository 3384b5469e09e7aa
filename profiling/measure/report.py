"""Shows a profile to people: tables of text and a picture."""

from collections.abc import Mapping

from pat_jax.common.html.charts import Axis, Line, Plot, tp_colour
from pat_jax.common.html.figure import Figure
from pat_jax.common.text_table import starred, text_table
from pat_jax.planning.latency.profile import Profile
from pat_jax.planning.types import Split


def tables(profile: Profile) -> str:
    """Returns all measured times as tables of text, in milliseconds."""
    latency = profile.latency
    calls = f"prefill, one call of {latency.prefill_blocks} pages of {latency.page_size} tokens"
    lists = {
        calls: {f"{split} cache {n}": s for (split, n), s in latency.prefill_table.items()},
        "reshard all weights": {f"{a} -> {b}": s for (a, b), s in latency.reshard_table.items()},
        f"migrate {latency.round_tokens} tokens a group": {
            _round(a, b, kind): s for (a, b, kind), s in latency.migrate_table.items()
        },
    }
    parts = [
        text_table([title, "ms"], [[name, 1e3 * s] for name, s in seconds.items()])
        for title, seconds in lists.items()
        if seconds
    ]
    origin = (
        f"one device measured, with the shards of {profile.shards_of}; reshards and migrations "
        "are computed from its links and memory"
    )
    decoding = _decode_table(latency.decode_table)
    return "\n\n".join([*[origin] * bool(profile.shards_of), decoding, *parts])


def _decode_table(table: Mapping[tuple[Split, int, int], float]) -> str:
    """Returns a line for each cache length and number of sequences, a column for each layout."""
    splits = list(dict.fromkeys(split for split, _, _ in table))
    rows = []
    for length, running in sorted({(length, rows * split.dp) for split, rows, length in table}):
        known = [
            table.get((s, running // s.dp, length)) if running % s.dp == 0 else None for s in splits
        ]
        rows.append([length, running, *starred([s and 1e3 * s for s in known])])
    header = ["cache", "running", *map(str, splits)]
    caption = "decode, ms a step; * the quickest layout of the line"
    return f"{caption}\n{text_table(header, rows)}"


def _round(source: Split, target: Split, senders: str) -> str:
    if source == target:
        return f"{source}, between its groups"
    return f"{source} -> {target}, {senders} sending"


def draw_profile(profile: Profile) -> Figure:
    """Draws the decode step over the running sequences, a chart for each cache length."""
    table = profile.latency.decode_table
    steps_ms = {
        (split, rows * split.dp, length): 1e3 * s for (split, rows, length), s in table.items()
    }
    across = Axis.over([running for _, running, _ in steps_ms], is_log=True)
    up = Axis.over([*steps_ms.values()], is_log=True)
    subject = profile.subject
    plots = list[Plot]()
    for length in sorted({length for _, _, length in steps_ms}):
        lines = []
        for split in dict.fromkeys(split for split, _, _ in steps_ms):
            points = sorted(
                (running, ms)
                for (layout, running, cache), ms in steps_ms.items()
                if (layout, cache) == (split, length)
            )
            lines.append(Line(str(split), points, tp_colour(split.tp), is_dotted=True))
        plots.append(
            Plot(
                lines,
                across=across,
                up=up,
                across_words="running sequences, evenly over the groups",
                up_words=f"ms a decode step, cache of {length:,} tokens",
                note="",
            )
        )
    told = f"{subject.num_devices} x {subject.device_kind}, {subject.dtype}"
    return Figure(plots, columns=min(3, len(plots)), width=380, told=[told])
