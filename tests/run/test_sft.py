"""Supervised fine-tuning from files to an export: it learns, compiles nothing on the way, and resumes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from arrays import assert_same_bits
from file_runs import Whole, made, stop_at, to_the_end
from metrics_table import untold
from row_writing import write_lines
from runs import SMALL_ROLLOUT, finish, run, start, without_times, write_checkpoint, write_problems

from pat_jax.common.errors import UserError
from pat_jax.config.role_table import POLICY
from pat_jax.models.checkpoints.hf_load import check_checkpoint
from pat_jax.rl.algorithm.supervised import cross_entropy, to_example_batch
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.roles.role_params import initial_params
from pat_jax.run.sft import loop
from pat_jax.run.sft.loop import SftRun
from pat_jax.run.sft.setup import SftSetup

COMMAND = ("-m", "pat_jax.sft")
STEPS = 12  # of three epochs
OPTIONS = [
    *("--devices", "2"),
    *("--max_length", "64"),
    *("--tokens_per_micro_batch", "256"),
    *("--batch_size", "16"),
    *("--epochs", "3"),
    *("--eval.every", "6"),
    *("--eval.share", "0.1"),
    *("--checkpoint.every", "5"),
    *("--optimizer.learning_rate", "1e-2"),
]


def write_sums(path: Path) -> Path:
    rows = [{"prompt": f"{i}+{j}=", "completion": f"{i + j}"} for i in range(8) for j in range(8)]
    return write_lines(path, *rows)


@pytest.fixture(scope="module")
def given_options(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("given")
    model, data = write_checkpoint(folder / "model"), write_sums(folder / "sums.jsonl")
    return [*OPTIONS, "--model", str(model), "--data", str(data)]


@pytest.fixture(scope="module")
def whole(given_options, tmp_path_factory) -> Whole:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    export = ["--checkpoint.export_dir", str(folder / "policy")]
    setup = made(*given_options, "--run_dir", str(folder), *export)
    assert setup.steps == STEPS
    return to_the_end(setup)


def saved_state(folder: Path, setup: SftSetup) -> tuple[int, TrainState, dict[str, Any]]:
    with Checkpointer(folder / CHECKPOINTS, fingerprint=setup.fingerprint) as checkpoints:
        step, state, meta = checkpoints.restore({"train": setup.trainer.abstract_state})
    return step, state["train"], meta


def assert_same_runs(one: Path, whole: Whole) -> None:
    expected, found = (read_metrics(x / "metrics.jsonl") for x in (whole.folder, one))
    assert without_times(found) == without_times(expected)
    ours, theirs = (saved_state(folder, whole.setup) for folder in (one, whole.folder))
    assert ours[0] == theirs[0] == STEPS and ours[2]["drawn"] == theirs[2]["drawn"]
    assert_same_bits(ours[1], theirs[1])


def test_nothing_compiles_after_the_programs(whole: Whole):
    assert whole.begun == whole.compiled == []


def test_it_learns_what_it_is_shown(whole: Whole):
    rows = read_metrics(whole.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    losses = [row["train/loss"] for row in rows[1:]]
    assert losses[0] > 4 and losses[-1] < 0.6 * losses[0]
    evaluated = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    assert list(evaluated) == [0, 6, STEPS] and evaluated[STEPS] < 0.6 * evaluated[0]
    assert rows[-1]["progress/epoch"] == 3
    assert min(row["train/padding_efficiency"] for row in rows[1:]) > 0.4
    names = {name for row in rows for name in row} - {"step", "time"}
    assert untold(names) == set()


def test_gradients_that_stay_no_numbers_end_a_run(
    whole: Whole, given_options, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    setup = made(*given_options, "--run_dir", str(folder))
    monkeypatch.setattr(loop, "MOST_IN_A_ROW", 2)
    setup = replace(setup, roles=whole.setup.roles)  # which is compiled
    run = SftRun(setup, StopSignals())
    at = run.begin()
    params = jax.tree.map(lambda x: x * np.nan, at.state.params)
    at = replace(at, state=replace(at.state, params=params))
    with pytest.raises(UserError, match=r"3 optimizer steps in a row .* the last in step 3"):
        run.learn(at)
    run.files.release()
    kept = folder / "skipped" / "step-3.npz"
    examples = setup.examples.draw(2 * 16, 16)
    (mini,) = to_example_batch(examples, setup.shapes).mini_batches
    np.testing.assert_array_equal(np.load(kept)["0.0.tokens"], mini[0].tokens)


def test_the_held_out_loss_is_that_of_the_update(whole: Whole):
    """Before its optimizer step, on the same batch."""
    setup, trainer = whole.setup, whole.setup.trainer
    state = trainer["init_state"](initial_params(setup.roles.models[POLICY], trainer, 0))
    examples = setup.examples.draw(0, 16)
    batch = to_example_batch(examples, setup.shapes)
    expected = cross_entropy(trainer.predict(state, batch), trainer.old)
    _, result = trainer.update(state, batch)
    assert result.metrics["train/loss"] == pytest.approx(expected, rel=1e-5)


def test_the_export_is_the_policy_of_the_last_checkpoint(whole: Whole):
    exported = whole.folder / "policy"
    assert check_checkpoint(exported) == check_checkpoint(Path(whole.setup.config.model))
    step, state, _ = saved_state(whole.folder, whole.setup)
    assert step == STEPS
    trainer, own = whole.setup.trainer, whole.setup.roles.models[POLICY]
    again = replace(own, role=replace(own.role, source=str(exported)))
    params = initial_params(again, trainer, 0)
    assert_same_bits(params, state.params)


@pytest.mark.parametrize("at", [7, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_bit_for_bit(
    whole: Whole, given_options, tmp_path, capsys, monkeypatch, at: int
):
    folder = tmp_path / "run"
    monkeypatch.setattr(SftRun, "compile", lambda run: 0.0)  # `whole` has
    setup = made(*given_options, "--run_dir", str(folder))
    setup = replace(setup, roles=whole.setup.roles)
    stop_at(at, setup)
    printed = capsys.readouterr().err
    assert (
        f"the policy after step {at} is saved; go on with: python -m pat_jax.sft --resume"
        in printed
    )

    setup = made("--resume", "--run_dir", str(folder))
    assert not setup.config.checkpoint.export_dir and setup.config.batch_size == 16
    SftRun(replace(setup, roles=whole.setup.roles), StopSignals()).run()
    printed = capsys.readouterr().err
    assert f"resumed after step {at}\n" in printed and "other examples" not in printed
    assert_same_runs(folder, whole)


def test_a_run_that_goes_on_with_other_examples_says_so(whole: Whole, tmp_path, capsys):
    data = write_sums(tmp_path / "sums.jsonl")
    data.write_text(data.read_text().replace("7", "8"))
    setup = made("--resume", "--run_dir", str(whole.folder), "--data", str(data))
    run = SftRun(setup, StopSignals())
    run.begin()
    run.files.release()
    printed = capsys.readouterr().err
    assert "resumed with other options: data.files" in printed
    assert "resumed with other examples than before" in printed


@pytest.mark.slow
def test_reinforcement_learning_begins_from_the_export(tmp_path: Path):
    """Both commands, in processes of their own."""
    model, policy = write_checkpoint(tmp_path / "model"), str(tmp_path / "policy")
    data = write_sums(tmp_path / "sums.jsonl")
    problems = write_problems(tmp_path / "problems.jsonl")
    given = [*OPTIONS, "--model", str(model), "--data", str(data)]
    folder = ["--run_dir", str(tmp_path / "sft"), "--checkpoint.export_dir", policy]
    output = finish(start(*given, *folder, program=COMMAND))
    assert f"in {policy}: the policy as a Hugging Face directory" in output
    assert "held-out loss" in output and "examples: " in output
    options = ["--model", policy, "--data", str(problems), "--rollout.max_prompt_length", "120"]
    output = run(*SMALL_ROLLOUT, *options, "--run_dir", str(tmp_path / "rl"))
    assert "step 2/2" in output
    rows = read_metrics(tmp_path / "rl" / "metrics.jsonl")
    assert np.isfinite([row["train/loss"] for row in rows[1:]]).all()
