"""The picture of a rollout: it is drawn, it shows what the trace says, the trace comes back."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from pat_jax.engine.trace import RolloutTrace, Switch
from pat_jax.plot import plot_rollout

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
    seen: dict[str, list] = {"text": [], "annotate": [], "axvline": [], "axvspan": [], "step": []}
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
    assert [text[2] for text in drawn["text"]] == ["prefill", "dp2tp1", "dp1tp2"]
    assert drawn["axvspan"] == [(0, 0.5), (0.5, 2.5), (2.5, 4.0), (2.25, 2.5)]
    assert drawn["axvline"] == [(2.5,)]
    assert drawn["step"] == [([0.5, 1.5, 2.5, 4.0], [32, 20, 4, 0])]
    ((note, *_),) = drawn["annotate"]
    assert note.splitlines() == [
        "migrate KV, 3 MiB",
        "predicted saving 1.5 s",
        "cost 250 ms (predicted 200 ms)",
    ]


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
