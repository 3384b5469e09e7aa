"""The command from its options to the files that it leaves."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml
from arrays import assert_same_bits
from metrics_table import untold
from runs import (
    SMALL_ROLLOUT,
    TINY,
    run,
    saved_run,
    write_checkpoint,
    write_problems,
)

from pat_jax.config.command_line import dump, parse
from pat_jax.config.role_table import POLICY
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.logging.rollout_files import read_rollouts
from pat_jax.run.results.saved_run import SavedRun
from pat_jax.run.roles.role_params import initial_params

SHOWN = ["--eval.num_generations", "2", "--placement", "auto"]
REWARD = """
def score(prompts, completions, finish_reason, **columns):
    assert all(prompt.endswith("=") for prompt in prompts) and set(columns) == {"answer"}
    return [text.count("1") + (end == "length") / 8 for text, end in zip(completions, finish_reason)]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A run with every default of the planner, and what it printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "deep" / "run"
    return run_dir, run(*TINY, *SHOWN, "--run_dir", str(run_dir))


def test_a_run_leaves_its_files(finished: tuple[Path, str]):
    run_dir, _ = finished
    names = {path.name for path in run_dir.iterdir()}
    files = "config.yaml metrics.jsonl rollout.svg rollout.json run.log run.html rollouts.json "
    files += "samples.json .lock profile.json checkpoints tensorboard"
    assert names == set(files.split())
    assert (run_dir / "rollout.svg").read_text().startswith("<svg ")
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["2"]
    (events,) = (run_dir / "tensorboard").iterdir()
    assert b"reward/mean" in events.read_bytes() and b"samples/text_summary" in events.read_bytes()
    page = (run_dir / "run.html").read_text()
    assert 'id="step-1"' in page and 'id="step-2"' not in page
    assert "held-out reward before and after step 2" in page
    kept = read_rollouts(run_dir)
    assert (kept["first"].step, kept["newest"].step) == (1, 2)
    saved = SavedRun(run_dir).rollout
    assert kept["newest"].trace == saved and saved.running[0] == 8


def test_a_run_logs_what_its_stages_took(finished: tuple[Path, str]):
    log = (finished[0] / "run.log").read_text()
    found = re.findall(r"step (\d): rollout \S+ s, .*update of the policy \S+ s", log)
    assert found == ["1", "2"]


def test_a_run_says_once_what_other_placements_would_take(finished: tuple[Path, str]):
    run_dir, output = finished
    rows = read_metrics(run_dir / "metrics.jsonl")
    found = {name: s for name, s in rows[-1].items() if name.startswith("placement/")}
    assert found.keys() == {"placement/flatten", "placement/separate"}  # nothing has halves
    assert not any(name.startswith("placement/") for name in rows[-2])
    assert 0 < found["placement/flatten"] <= rows[-1]["timing/step"]
    assert found["placement/separate"] > rows[-1]["timing/update"]
    line = f"took {found['placement/flatten']:.3g} s with flatten"
    for text in (output, (run_dir / "run.log").read_text(), (run_dir / "run.html").read_text()):
        assert text.count(line) == 1


def test_a_run_writes_the_metrics_of_every_step(finished: tuple[Path, str]):
    rows = read_metrics(finished[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert ["eval/reward" in row for row in rows] == [True, False, True]
    for row in (rows[0], rows[2]):
        assert 0 <= row["eval/reward"] <= row["eval/pass@2"] <= 1 and row["eval/failed"] == 0
    for row in rows[1:]:
        assert row["train/skipped_updates"] == 0 and row["train/grad_norm"] >= 0
        assert 0 < row["rollout/length_p50"] <= row["rollout/length_max"] <= 56
        assert 8 <= row["rollout/tokens"] <= 8 * 56 and row["rollout/layouts"].startswith("dp")
        assert row["timing/update"] > 0 and row["timing/rollout"] > 0
        # What the policy says of its own samples under the trainer's layout, in nats.
        assert row["train/behavior_gap_max"] < 1e-4
        assert row["train/learning_rate"] == 3e-4 and "progress/epoch" not in row
        stages = sum(row[f"timing/{name}"] for name in ("rollout", "reward", "update", "transfer"))
        assert stages <= row["timing/step"] < row["time"]
    assert rows[2]["timing/checkpoint"] > 0
    # The first transfer of an update is looked at, and then one in many.
    assert 0 <= rows[1]["train/transfer_gap"] < 1e-4 and "train/transfer_gap" not in rows[2]
    drawn = [row["progress/tokens"] for row in rows[1:]]
    assert drawn[1] - drawn[0] > rows[2]["rollout/tokens"] and drawn[0] > rows[1]["rollout/tokens"]
    assert untold({name for row in rows for name in row} - {"step", "time"}) == set()


def test_a_run_shows_progress_and_a_summary(finished: tuple[Path, str]):
    run_dir, output = finished
    for words in (f"run folder {run_dir}; layouts dp2tp1, dp1tp2", "compiled in", "warm start: 2"):
        assert words in output
    assert "step 1/2  reward" in output and "step 2/2  reward" in output
    assert "\n2 steps in " in output and "\nheld-out reward " in output
    # Why its layout was kept or left; and the log has the steps as well.
    assert "\nnewest rollout: " in output
    assert "step 1/2  reward" in (run_dir / "run.log").read_text()
    assert "Warning" not in output and "Traceback" not in output


def test_the_configuration_of_a_run_reads_back_equal(finished: tuple[Path, str]):
    run_dir, _ = finished
    again = parse(["--config", str(run_dir / "config.yaml")])
    settled = ["--roles.rest", "device", "--remat", "none"]
    assert again == parse([*TINY, *SHOWN, *settled, "--run_dir", str(run_dir)])
    assert dump(again) == (run_dir / "config.yaml").read_text()


@pytest.mark.slow  # a whole command
def test_a_checkpoint_directory_learns_a_data_file(tmp_path: Path):
    """Options from YAML and the command line, the math reward, the policy written back."""
    model, run_dir = write_checkpoint(tmp_path / "model"), tmp_path / "run"
    data = write_problems(tmp_path / "problems.jsonl")
    wanted = {"model": str(model), "data": str(data), "steps": 7, "layout": "dp1tp2"}
    wanted |= {"warm_start": {"steps": 0}, "seed": 5, "eval": {"temperature": 0}}
    config_file = tmp_path / "mine.yaml"
    config_file.write_text(yaml.safe_dump(wanted))
    options = [*SMALL_ROLLOUT, "--rollout.max_prompt_length", "120", "--rollout.min_length", "176"]
    export = ["--steps", "1", "--reward", "math", "--checkpoint.export_dir", str(run_dir / "hf")]
    output = run("--config", str(config_file), "--run_dir", str(run_dir), *options, *export)

    written = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert (written["steps"], written["seed"], written["layout"]) == (1, 5, "dp1tp2")
    assert (written["eval"]["every"], written["eval"]["temperature"]) == (2, 0.0)
    assert "to train on, " in output and "left out: 0 longer than 120 tokens" in output
    assert read_metrics(run_dir / "metrics.jsonl")[-1]["rollout/layouts"] == "dp1tp2"
    assert check_checkpoint(run_dir / "hf") == check_checkpoint(model)
    setup, state, _ = saved_run(run_dir)
    written_back = load_params(run_dir / "hf", setup.policy, None, jnp.float32)
    assert_same_bits(written_back, state.params)
    assert HuggingFaceTokenizer(run_dir / "hf").has_chat_template
    assert json.loads((run_dir / "hf" / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.slow
def test_without_training_there_are_rollouts_and_the_same_parameters(tmp_path: Path):
    (tmp_path / "my_module.py").write_text(REWARD)
    options = ["--train", "false", "--warm_start.steps", "0", "--reward", "my_module:score"]
    output = run(*TINY, *options, "--run_dir", "here", cwd=tmp_path)
    rows = read_metrics(tmp_path / "here" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["reward/mean"] > 0 and "train/loss" not in row for row in rows[1:])
    assert rows[0]["eval/reward"] == rows[2]["eval/reward"] > 0
    assert "\nin here: the configuration, " in output
    assert (tmp_path / "here" / "rollout.svg").exists()
    setup, state, step = saved_run(tmp_path / "here")
    assert step == 2
    assert_same_bits(state.params, initial_params(setup.roles.models[POLICY], setup.trainer, 0))


@pytest.mark.slow
def test_bfloat16_several_inner_iterations_and_a_switch(tmp_path: Path):
    (tmp_path / "my_module.py").write_text(REWARD)
    options = "--compute_dtype bfloat16 --algorithm.num_iterations 2 --algorithm.mini_batch_size 2"
    options += " --layout dp1tp2@7"
    options += " --warm_start.steps 0 --optimizer.learning_rate 1e-3 --reward my_module:score"
    run(*TINY, *options.split(), "--steps", "1", "--run_dir", "here", cwd=tmp_path)
    row = read_metrics(tmp_path / "here" / "metrics.jsonl")[1]
    assert row["rollout/layouts"] == "dp2tp1 -> dp1tp2"
    (switch,) = json.loads((tmp_path / "here" / "rollout.json").read_text())["moves"]
    assert switch["kv"] == "migrate" and 0 < switch["running"] <= 7
    # The later mini-batches and the second pass have moved away from the policy that sampled.
    assert row["train/approx_kl"] > 0
    assert 1e-5 < row["train/behavior_gap_max"] < 0.2


@pytest.mark.slow  # compiles a trainer and an engine
def test_a_run_with_quantized_weights_reports_the_gap(tmp_path: Path):
    """What the rollout samples from is not what is trained, and by how much is written down."""
    options = ["--rollout.weights", "int8", "--eval.every", "0", "--run_dir", "here"]
    run(*TINY, *options, cwd=tmp_path)
    rows = read_metrics(tmp_path / "here" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 1e-4 < row["train/behavior_gap"] < row["train/behavior_gap_max"] < 0.5
    _, state, _ = saved_run(tmp_path / "here")
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
