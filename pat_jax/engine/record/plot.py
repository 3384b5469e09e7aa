"""A picture of one rollout: running sequences, layouts, switches, and tokens from drafts.

Knows `RolloutTrace`; `running_plot.py` has its charts.
"""

from collections.abc import Mapping
from pathlib import Path

from pat_jax.common.files import replace_text
from pat_jax.common.html.figure import Figure
from pat_jax.engine.record.running_plot import (
    SOURCES,
    accepted_by_source,
    draft_plots,
    running_plot,
)
from pat_jax.engine.record.trace import DraftTrace, Move, RolloutTrace

MOST_TOLD = 12  # most switches described under the picture; its .json file has all


def plot_rollout(trace: RolloutTrace, path: str | Path) -> None:
    """Writes the picture to `path` (SVG) and the trace beside it (the same name, `.json`).

    Args:
      trace: the rollout.
      path: path of the picture; its folder is made if missing.
    """
    path = Path(path)
    draw_rollout(trace).save(path)
    replace_text(path.with_suffix(".json"), trace.to_json() + "\n")


def draw_rollout(trace: RolloutTrace) -> Figure:
    return draw_rollouts({"": trace})


def draw_rollouts(traces: Mapping[str, RolloutTrace]) -> Figure:
    """Draws rollouts one below the other, over the same seconds.

    Args:
      traces: traces by their titles.
    """
    until_s = max(trace.total_s for trace in traces.values())
    plots = []
    for name, trace in traces.items():
        plots += [running_plot(trace, _title(trace, name), until_s), *draft_plots(trace, until_s)]
    return Figure(plots, told=[line for trace in traces.values() for line in _told(trace)])


def _title(trace: RolloutTrace, name: str) -> str:
    switches = len(trace.switches)
    return (
        f"{name}{': ' * bool(name)}{max(trace.running, default=0):,} responses in {_seconds(trace.total_s)}:"
        f" {trace.total_steps:,} decode steps, {switches} switch{'' if switches == 1 else 'es'}"
    )


def _draft_words(drafts: DraftTrace) -> str:
    *sources, _ = SOURCES
    counts = {name: sum(of) for name, of in accepted_by_source(drafts).items() if name in sources}
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    text = f"drafts: {sum(drafts.drafted):,} tokens drafted, {sum(drafts.accepted):,} accepted"
    text += f" ({parts})" if parts else ""
    if drafts.saving_s is None or drafts.predicted_saving_s is None:
        return text
    return (
        f"{text}; saved {_seconds(drafts.saving_s)} "
        f"(predicted {_seconds(drafts.predicted_saving_s)})"
    )


def _switch_words(switch: Move, number: int) -> str:
    moved = "" if switch.sent is None else f", {_bytes(switch.sent.total)} moved"
    told = (
        f"{number}: {switch.source} to {switch.target} at {switch.running:,} running, {switch.kv} KV{moved}; "
        f"cost {_seconds(switch.seconds)}"
    )
    if not switch.predicted_cost_s:  # scripted
        return told
    return (
        f"{told} (predicted {_seconds(switch.predicted_cost_s)}), "
        f"predicted saving {_seconds(switch.predicted_saving_s)}"
    )


def _told(trace: RolloutTrace) -> list[str]:
    """The lines of text under the picture."""
    told = [_switch_words(switch, i) for i, switch in enumerate(trace.switches, start=1)]
    if len(told) > MOST_TOLD:
        told[MOST_TOLD:] = [f"and {len(told) - MOST_TOLD} more: see the .json beside this picture"]
    if any(trace.drafts.drafted):
        told.append(_draft_words(trace.drafts))
    return told


def _seconds(seconds: float) -> str:
    if abs(seconds) < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if abs(seconds) < 999.5 else f"{seconds:,.0f} s"


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"
