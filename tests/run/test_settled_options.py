"""Each command takes what a checkpoint and the devices bring, before anything is made by it."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import pytest
from runs import SMALL_ROLLOUT, write_checkpoint, write_problems

from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.commands import evaluate, generate, plan, profile
from pat_jax.config.command_line import parse
from pat_jax.config.sft import SftConfig
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.measure.config import ProfileConfig
from pat_jax.run import opened
from pat_jax.run.opened import files_of
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.results import session
from pat_jax.run.sft import loop as sft_loop
from pat_jax.run.sft import setup as sft
from pat_jax.run.start import setup

LENGTHS = ("--rollout.max_completion_length", "56")


class NamedDevice(NamedTuple):
    """What is asked of a device before anything is put there."""

    platform: str
    id: int = 0
    process_index: int = 0


class Seen(Exception):
    """With what a function was called."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("settled")
    write_checkpoint(folder / "model")  # of a context of 512 tokens
    write_problems(folder / "sums.jsonl", 24)
    return folder


@pytest.fixture
def seen(monkeypatch) -> Callable[..., Any]:
    """An argument of a function of a module, which a call comes to: the first, or another."""

    def first(
        module: ModuleType, name: str, call: Callable[..., object], *arguments: object, at: int = 0
    ):
        def stop(*given: object, **_: object):
            raise Seen(given[at])

        monkeypatch.setattr(module, name, stop)
        with pytest.raises(Seen) as caught:
            call(*arguments)
        return caught.value.args[0]

    return first


def asked(folder: Path, *options: str) -> list[str]:
    small = [word for word in SMALL_ROLLOUT if word not in LENGTHS]
    names = ["--model", str(folder / "model"), "--data", str(folder / "sums.jsonl")]
    return [*small, *names, "--run_dir", str(folder / "run"), *options]


def examples(folder: Path) -> list[str]:
    names = ["--model", str(folder / "model"), "--data", str(folder / "sums.jsonl")]
    columns = ["--data.prompt_key", "question", "--data.completion_key", "answer"]
    return [*names, *columns, "--run_dir", str(folder / "run"), "--steps", "1"]


def test_a_run_is_made_and_recorded_with_what_its_model_brings(folder: Path, seen):
    built = setup.build(parse(asked(folder)), jax.devices()[:2])
    config = built.config
    shared = config.rollout.max_prompt_length, config.rollout.max_completion_length
    assert (*shared, config.compute_dtype) == (256, 256, "float32")
    assert built.engine.specs.buckets.lengths[-1] == 512
    assert "--rollout.max_completion_length is 256 in place of 1,024" in built.shortened
    opening = files_of(built, StopSignals())
    recorded = seen(opened, "OpenRun", opening.__enter__)
    assert recorded is config


def test_examples_are_read_and_recorded_with_what_the_model_brings(folder: Path, seen):
    config = parse(examples(folder), SftConfig, presets=None)
    built = sft.build(config, jax.devices()[:2])
    assert (built.config.max_length, built.config.compute_dtype) == (512, "float32")
    assert "--max_length is 512 in place of 1,024\nexamples: " in built.note
    assert seen(sft_loop, "OpenRun", sft_loop.SftRun, built, StopSignals()) is built.config


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16")])
def test_every_command_computes_in_what_suits_the_devices(
    folder: Path, seen, monkeypatch, platform: str, dtype: str
):
    devices: Any = [NamedDevice(platform)]
    model, data = ["--model", str(folder / "model")], ["--data", str(folder / "sums.jsonl")]
    for module in (evaluate, generate, profile):
        monkeypatch.setattr(module, "configure", lambda _: devices)
    train = parse(asked(folder))
    measure = parse(asked(folder), ProfileConfig)
    teach = parse(examples(folder), SftConfig, presets=None)
    write = parse(model, GenerateConfig, presets=None)
    examine = parse([*model, *data, "--out", "x"], EvaluateConfig, presets=None)
    for found in (
        seen(setup, "profile_subject", setup.build, train, devices, at=2),
        seen(profile, "profile_subject", profile.measured, measure, at=2),
        seen(sft, "read_lessons", sft.build, teach, devices),
        seen(session, "build_engine", generate.prepared, write),
        seen(session, "build_engine", evaluate.evaluate_policy, examine),
    ):
        assert dtype in (found, getattr(found, "dtype", ""), getattr(found, "compute_dtype", ""))


def test_a_policy_of_a_run_is_evaluated_in_its_own_arithmetic(monkeypatch):
    saved = cast(Any, SimpleNamespace(model="m", step=3, compute_dtype="bfloat16"))
    monkeypatch.setattr(evaluate, "find_policy", lambda *_: saved)
    monkeypatch.setattr(evaluate, "is_checkpoint", lambda _: True)
    config, _ = evaluate.with_saved(EvaluateConfig(run_dir="run"))
    assert config.compute_dtype == "bfloat16"
    config, _ = evaluate.with_saved(EvaluateConfig(run_dir="run", compute_dtype="float32"))
    assert config.compute_dtype == "float32"


def test_a_plan_of_a_small_context_is_made_and_recorded(folder: Path, tmp_path: Path, capsys):
    words = "--target h100:8 --max_prompt_length 100 --prompt_tokens 16 --responses 32 --rollouts 1"
    options = ["--model", str(folder / "model"), *words.split(), "--compile", "false"]
    options += ["--run_dir", str(tmp_path / "plan")]
    plan.made_plan(parse(options, PlanConfig, presets=None), "the command")
    assert "max_completion_length is 412 in place of 24,576" in capsys.readouterr().err
    recorded = parse(["--config", str(tmp_path / "plan/config.yaml")], PlanConfig, presets=None)
    assert recorded.rollout.max_completion_length == 412
