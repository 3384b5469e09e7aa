"""What `--show_switch` adds to a run: it shows, and changes nothing."""

import json
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from arrays import assert_same_bits
from runs import TINY, run, saved_run, without_times

from pat_jax.commands import show_switch
from pat_jax.commands.show_switch import NEXT, PLAN, computed_plan
from pat_jax.config.command_line import parse
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.process.stop_signals import Stopped


def words(command: str, name: str) -> list[str]:
    python, flag, module, *options = shlex.split(command)
    assert (python, flag, module) == ("python", "-m", f"pat_jax.{name}")
    return options


def test_the_commands_that_are_printed_parse():
    plan = parse(words(PLAN, "plan"), PlanConfig, presets=None)
    assert plan.target == "h100:8" and not plan.compile
    assert parse(words(NEXT, "train")).model != "demo"


def test_only_the_demo_shows_a_switch():
    assert parse(["--preset", "demo"]).show_switch and parse([]).show_switch
    assert not parse(words(NEXT, "train")).show_switch
    assert not parse(["--preset", "switching"]).show_switch


def test_a_plan_is_computed_from_what_is_shipped():
    found = computed_plan(PLAN.replace("--responses 512", "--responses 64"))
    assert found.trace.is_computed and found.responses == 64
    assert {name for name, _ in found.static} == {"dp8tp1", "dp4tp2", "dp2tp4", "dp1tp8"}
    assert 0 < found.planned_s <= 1.02 * found.best_static[1]
    assert found.trace.total_s == pytest.approx(found.planned_s)


def a_run(**changes: Any) -> Any:
    layouts = {"dp2tp1": None, "dp1tp2": None}
    made_of = {"first": 0, "setup": SimpleNamespace(layouts=layouts)}
    return SimpleNamespace(config=SimpleNamespace(steps=2), **(made_of | changes))


def test_a_failure_costs_a_line(monkeypatch, caplog, capsys):
    def fail(run: Any) -> None:
        raise ValueError("no such thing\nmore of it")

    monkeypatch.setattr(show_switch, "same_rollout", fail)
    show_switch.show_switch(a_run())
    line = "--show_switch shows nothing (ValueError: no such thing); the run is complete"
    assert capsys.readouterr().out.splitlines() == caplog.messages == [line]


def test_a_signal_ends_it_and_says_that_the_run_is_complete(monkeypatch, capsys):
    def stop(run: Any) -> None:
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(show_switch, "same_rollout", stop)
    with pytest.raises(Stopped):
        show_switch.show_switch(a_run())
    assert "(stopped by SIGINT); the run is complete" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_shows_a_switch_learns_and_saves_the_same(tmp_path: Path):
    """Weights, metrics and what a resumed run begins with: to the bit."""
    path = ["--layout", "dp1tp2@4"]  # no clock decides
    with_it = run(*TINY, *path, "--run_dir", "with", "--show_switch", "true", cwd=tmp_path)
    without = run(*TINY, *path, "--run_dir", "without", cwd=tmp_path)
    assert "made twice" in with_it and "made twice" not in without
    folders = [tmp_path / "with", tmp_path / "without"]
    for shown, plain in [[without_times(read_metrics(x / "metrics.jsonl")) for x in folders]]:
        assert shown == plain
    (_, one, step), (_, other, _) = map(saved_run, folders)
    assert step == 2
    assert_same_bits(one, other)
    assert json.loads((folders[0] / "switch.json").read_text())["step"] == 3
    more = ["--resume", "--steps", "3", "--run_dir"]
    for folder in folders:
        run(*more, folder.name, cwd=tmp_path)
    (_, one, step), (_, other, _) = map(saved_run, folders)
    assert step == 3
    assert_same_bits(one, other)
