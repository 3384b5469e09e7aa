"""The picture of a rollout: it is drawn, it shows what the trace says, the trace comes back."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.image import imread

from pat_jax.engine.trace import RolloutTrace, Switch
from pat_jax.run.plot import MOST_TOLD, draw_rollout, plot_rollout

SWITCH = Switch(
    step=128,
    live=4,
    source="dp2tp1",
    target="dp1tp2",
    bytes_moved=3 * 2**20,
    seconds=0.25,
    predicted_saving_s=1.5,
    predicted_cost_s=0.2,
    kv="migrate",
    reason="the saving exceeds the cost",
)
TRACE = RolloutTrace(
    times_s=(0.5, 1.5, 2.5),
    steps=(0, 64, 128),
    live=(32, 20, 4),
    layout=("dp2tp1", "dp2tp1", "dp1tp2"),
    total_s=4.0,
    total_steps=200,
    switches=(SWITCH,),
)


@pytest.fixture
def drawn(monkeypatch) -> dict[str, list]:
    """What is put on the axes: texts, positions of the lines, bands with their labels' order."""
    seen: dict[str, list] = {"text": [], "axvline": [], "axvspan": [], "step": []}
    for name, calls in seen.items():
        original = getattr(Axes, name)

        def record(self, *args, _calls=calls, _original=original, **kwargs):
            _calls.append(args)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(Axes, name, record)
    return seen


def test_the_picture_shows_bands_switches_and_live_sequences(tmp_path: Path, drawn):
    plot_rollout(TRACE, tmp_path / "deep" / "rollout.png")
    assert imread(tmp_path / "deep" / "rollout.png").shape[1] == 1440
    assert [text[2] for text in drawn["text"]] == ["prefill", "dp2tp1", "dp1tp2", "1"]
    assert drawn["axvspan"] == [(0, 0.5), (0.5, 2.5), (2.5, 4.0), (2.25, 2.5)]
    assert drawn["axvline"] == [(2.5,)]
    assert drawn["step"] == [([0.5, 1.5, 2.5, 4.0], [32, 20, 4, 0])]
    assert told(TRACE) == [
        "1: dp2tp1 to dp1tp2 at 4 live, migrate KV, 3 MiB moved; cost 250 ms (predicted 200 ms), "
        "predicted saving 1.5 s"
    ]


def told(trace: RolloutTrace) -> list[str]:
    """The lines under the picture."""
    return draw_rollout(trace, "time").get_supxlabel().splitlines()


def test_of_a_replay_no_bytes_are_told():
    (line,) = told(replace(TRACE, switches=(replace(SWITCH, bytes_moved=None),)))
    assert "migrate KV; cost" in line and " B" not in line


@given(
    ends=st.lists(st.integers(1, 400), min_size=2, max_size=40),
    at=st.lists(st.integers(1, 19), max_size=20, unique=True).map(sorted),
)
@settings(max_examples=15, deadline=None)
def test_nothing_covers_the_curve(ends: list[int], at: list[int]):
    """Of any curve and switches: no text lies where live sequences are drawn, none leaves the picture."""
    steps = tuple(range(0, 400, 20))
    live = tuple(sum(end > step for end in ends) for step in steps)
    layout = tuple(f"dp{1 + sum(20 * n <= step for n in at) % 2}tp1" for step in steps)
    trace = RolloutTrace(
        times_s=tuple(0.2 + step / 50 for step in steps),
        steps=steps,
        live=live,
        layout=layout,
        total_s=8.3,
        total_steps=400,
        switches=tuple(replace(SWITCH, step=20 * n, seconds=0.01) for n in at),
        done_after=tuple(sorted(ends)),
    )
    figure = draw_rollout(trace, "time")
    figure.draw_without_rendering()
    (axes,) = figure.axes
    drawn_to = axes.transData.transform((0, len(ends)))[1]
    names = [text.get_window_extent() for text in axes.texts]
    assert all(box.y0 >= drawn_to for box in names)
    words = [*names, *(text.get_window_extent() for text in figure.texts)]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 + 1 for box in words)
    assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in words)
    assert len(told(trace)) == min(len(at), MOST_TOLD + 1)


def test_decode_steps_may_run_to_the_right(tmp_path: Path, drawn):
    plot_rollout(TRACE, tmp_path / "rollout.png", axis="step")
    assert drawn["axvspan"] == [(0, 128), (128, 200)]
    assert drawn["axvline"] == [(128,)]


def test_the_curve_falls_where_sequences_end(tmp_path: Path, drawn):
    trace = replace(TRACE, live=(3, 2, 1), done_after=(32, 128, 164))
    plot_rollout(trace, tmp_path / "rollout.png")
    assert drawn["step"] == [([0.5, 1.0, 2.5, 3.25], [3, 2, 1, 0])]
    assert RolloutTrace.from_json((tmp_path / "rollout.json").read_text()) == trace


def test_the_trace_lies_beside_the_picture_and_reads_back(tmp_path: Path):
    plot_rollout(TRACE, tmp_path / "rollout.png")
    assert RolloutTrace.from_json((tmp_path / "rollout.json").read_text()) == TRACE


@pytest.mark.parametrize("axis", ["time", "step"])
def test_a_rollout_without_bursts_or_switches_is_drawn_too(tmp_path: Path, axis):
    plot_rollout(replace(TRACE, switches=()), tmp_path / "no-switch.png", axis=axis)
    plot_rollout(RolloutTrace((), (), (), (), 0.0, 0), tmp_path / "empty.png", axis=axis)
    assert (tmp_path / "empty.png").exists()


def test_the_path_begins_where_the_prompts_were_prefilled():
    assert TRACE.path == ["dp2tp1", "dp1tp2"]
    at_once = replace(SWITCH, step=0, live=32)
    left = replace(TRACE, layout=("dp1tp2",) * 3, switches=(at_once,))
    assert left.path == ["dp2tp1", "dp1tp2"]
    assert replace(left, switches=()).path == ["dp1tp2"]
    assert RolloutTrace((), (), (), (), 0.0, 0).path == []


def test_a_trace_with_entries_missing_is_refused():
    with pytest.raises(ValueError, match="one entry for each burst"):
        replace(TRACE, live=(1, 2))


def test_drafts_are_a_curve_of_their_own(drawn):
    """What a sequence said in a step, burst by burst; none where nothing was drafted."""
    draw_rollout(replace(TRACE, tokens_per_step=(1.0, 1.0, 1.0)))
    draw_rollout(replace(TRACE, tokens_per_step=(1.0, 1.8, 2.5)))
    live, again, drafts = drawn["step"]
    assert live == again == ([0.5, 1.5, 2.5, 4.0], [32, 20, 4, 0])
    assert drafts == ([0.5, 1.5, 2.5, 4.0], [1.0, 1.8, 2.5, 2.5])
