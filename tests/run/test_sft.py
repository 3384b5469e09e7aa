"""Learning from files, of examples or pairs, whole or adapters: it learns, compiles nothing late, resumes."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from file_runs import Whole, made, stop_at, to_the_end
from metrics_table import untold
from plain_model import outputs
from row_writing import write_lines
from runs import SMALL_ROLLOUT, finish, run, start, without_times, write_checkpoint, write_problems
from safetensors.numpy import load_file, save_file

import pat_jax.reward_model as reward_model
import pat_jax.sft as sft
from pat_jax.common.errors import UserError
from pat_jax.config.role_table import POLICY
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.checkpoints.peft_adapter import load_adapter, read_adapter
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.preferences import agreement
from pat_jax.rl.algorithm.supervised import cross_entropy, to_example_batch
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.data.examples import Pair
from pat_jax.rl.text.scored_text import scored_tokens
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
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


def test_gradients_that_stay_no_numbers_end_a_run(whole, given_options, tmp_path, monkeypatch):
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
def test_a_stopped_run_goes_on_bit_for_bit(whole, given_options, tmp_path, capsys, monkeypatch, at):
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


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> tuple[Path, list[str], SftSetup]:
    """The folder of a run to the end, its options, and what it was made of."""
    folder = tmp_path_factory.mktemp("runs") / "adapted"
    base, data = write_checkpoint(folder / "base"), write_problems(folder / "sums.jsonl")
    options = [
        *("--model", str(base), "--data", str(data), "--run_dir", str(folder / "run")),
        *("--data.prompt_key", "question", "--data.completion_key", "answer"),
        *("--devices", "2", "--max_length", "64", "--tokens_per_micro_batch", "256"),
        *("--batch_size", "8", "--steps", "12", "--eval.every", "12", "--eval.share", "0.2"),
        *("--lora.rank", "4", "--optimizer.learning_rate", "3e-2", "--lora.export", "adapter"),
        *("--scan_layers", "true"),
    ]
    setup = made(*options, "--checkpoint.export_dir", str(folder / "adapter"))
    assert to_the_end(setup).compiled == []
    return folder, options, setup


def test_adapters_learn_and_compile_nothing(adapted):
    folder, _, _ = adapted
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    losses = [row["train/loss"] for row in rows[1:]]
    assert len(losses) == 12 and losses[-1] < 0.9 * losses[0]


def test_the_export_is_the_adapters_of_the_checkpoint(adapted):
    folder, _, setup = adapted
    lora = setup.trainer.trained.lora
    with Checkpointer(folder / "run" / CHECKPOINTS, fingerprint=setup.fingerprint) as checkpoints:
        step, state, _ = checkpoints.restore({"train": setup.trainer.abstract_state})
    params = jax.device_get(state["train"].params)
    assert step == 12 and lora and set(params) == set(lora.modules)
    assert all(np.any(adapter.b) for adapter in params.values())
    known = read_adapter(folder / "adapter", setup.policy)
    assert (known.rank, known.modules) == (4, lora.modules)
    assert_same_bits(load_adapter(folder / "adapter", known), params)


def test_a_resumed_run_wants_its_own_base(adapted, tmp_path: Path):
    folder, options, compiled = adapted
    other = tmp_path / "other"
    shutil.copytree(folder / "base", other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + np.float32(1e-3)
    save_file(weights, other / "model.safetensors")
    elsewhere = ["--model", str(other), "--checkpoint.export_dir", str(tmp_path / "x")]
    setup = made(*options, "--resume", *elsewhere)
    roles = replace(compiled.roles, models=setup.roles.models)  # the programs are there
    run = SftRun(replace(setup, roles=roles), StopSignals())
    with pytest.raises(UserError, match="are of another base, whose weights differ"):
        run.begin()
    run.files.release()


PAIR_STEPS = 12
PAIR_OPTIONS = [
    *("--devices", "2", "--max_length", "64", "--tokens_per_micro_batch", "512"),
    *("--batch_size", "16", "--steps", str(PAIR_STEPS), "--eval.every", "6", "--eval.share", "0.2"),
    *("--checkpoint.every", "5", "--optimizer.learning_rate", "1e-2"),
]


def write_pairs(path: Path) -> Path:
    """The polite answer is preferred, whether it is right or not."""
    words = [("Sure", "Ugh"), ("Gladly", "Meh")]
    rows = [
        {"prompt": f"{i}+{j}?", "chosen": f"{good} {i + j}", "rejected": f"{bad} {i + j}"}
        for i in range(8)
        for j in range(8)
        for good, bad in [words[(i + j) % 2]]
    ]
    return write_lines(path, *rows)


@pytest.fixture(scope="module")
def pair_options(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("given")
    model, data = write_checkpoint(folder / "model"), write_pairs(folder / "pairs.jsonl")
    return [*PAIR_OPTIONS, "--model", str(model), "--data", str(data)]


@pytest.fixture(
    scope="module",
    params=[
        "reward_model",
        pytest.param("lora", marks=pytest.mark.slow),
        pytest.param("dpo", marks=pytest.mark.slow),
        pytest.param("dpo lora", marks=pytest.mark.slow),
    ],
)
def of_pairs(pair_options, tmp_path_factory, request) -> Whole:
    folder, kind = tmp_path_factory.mktemp("runs") / "of_pairs", request.param
    options = [*pair_options, "--run_dir", str(folder)]
    options += ["--checkpoint.export_dir", str(folder / "exported")]
    options += ["--lora.rank", "4"] * ("lora" in kind)
    command = sft if "dpo" in kind else reward_model
    options += ["--loss", "dpo"] * ("dpo" in kind)
    return to_the_end(made(*options, command=command))


def rewards_of(export: Path, pairs: list[Pair]) -> np.ndarray:
    """Of an exported reward model, computed one text after another."""
    model = check_checkpoint(export)
    policy = Policy.from_config(model)
    params = load_params(export, policy, None, jnp.dtype(jnp.float32))
    assert not model.head_bias
    both = [(pair.chosen.tokens, pair.rejected.tokens) for pair in pairs]
    return np.array([[outputs(policy, params, x)[-1] for x in pair] for pair in both])


def test_it_compiles_nothing_and_learns(of_pairs: Whole):
    assert of_pairs.compiled == []
    rows = read_metrics(of_pairs.folder / "metrics.jsonl")
    evaluated = {row["step"]: row for row in rows if "eval/loss" in row}
    assert list(evaluated) == [0, 6, PAIR_STEPS]
    first, last = evaluated[0], evaluated[PAIR_STEPS]
    assert first["eval/loss"] == pytest.approx(np.log(2)) and first[
        "eval/accuracy"
    ] == pytest.approx(0.5)
    assert last["eval/accuracy"] >= 0.95 and last["eval/loss"] < 0.4
    assert rows[-1]["train/accuracy"] >= 0.9
    assert untold({name for row in rows for name in row} - {"step", "time"}) == set()


def test_the_export_gives_the_measured_rewards(of_pairs: Whole):
    if of_pairs.setup.policy.config.head == "vocab":
        assert check_checkpoint(of_pairs.folder / "exported").head == "vocab"
        return
    export, pairs = of_pairs.folder / "exported", list(of_pairs.setup.lessons.heldout)
    measured = read_metrics(of_pairs.folder / "metrics.jsonl")[-1]
    found = agreement(rewards_of(export, pairs))
    for name, value in found.items():
        assert measured[f"eval/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-4)
    tokenizer = HuggingFaceTokenizer(export)
    assert any(
        pair.chosen.tokens.tolist() == list(scored_tokens(tokenizer, "0+0?", "Sure 0"))
        for pair in (*of_pairs.setup.lessons.train, *pairs)
    )


def test_a_stopped_run_on_pairs_goes_on_bit_for_bit(of_pairs: Whole, tmp_path, capsys, monkeypatch):
    folder, command = tmp_path / "run", of_pairs.setup.config
    module = reward_model if of_pairs.setup.policy.config.head == "scalar" else sft
    monkeypatch.setattr(SftRun, "compile", lambda run: 0.0)
    setup = replace(of_pairs.setup, config=replace(command, run_dir=str(folder)))
    stop_at(7, setup)
    again = f"go on with: python -m pat_jax.{module.COMMAND.name} --resume"
    assert again in capsys.readouterr().err

    resumed = made("--resume", "--run_dir", str(folder), command=module)
    run = SftRun(replace(resumed, roles=of_pairs.setup.roles), StopSignals())
    ended = run.learn(run.begin())
    assert_same_bits(jax.device_get(ended.state.params), of_pairs.params)
    run.files.release()
    ours, theirs = (read_metrics(x / "metrics.jsonl") for x in (folder, of_pairs.folder))
    assert without_times(ours) == without_times(theirs)
