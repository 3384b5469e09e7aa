"""Mistakes of the user: one sentence, exit code 2, nothing compiled and nothing written."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from runs import QWEN3, SMALL_ROLLOUT, TINY, write_checkpoint, write_problems

from pat_jax import train
from pat_jax.commands import train as body
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import dump, parse
from pat_jax.rl.data.problems import HELDOUT_SHARE
from pat_jax.rl.data.splits import Subset, subset_of
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.files.folder import CONFIG_FILE
from pat_jax.run.start.setup import build

WEIGHTS = "model.safetensors"


class Inputs:
    """A sound checkpoint directory and data file, to be damaged."""

    def __init__(self, folder: Path):
        self.model, self.data = folder / "model", folder / "problems.jsonl"
        self.run_dir = folder / "run"

    @property
    def options(self) -> list[str]:
        names = ["--model", str(self.model), "--data", str(self.data), "--warm_start.steps", "0"]
        return [*SMALL_ROLLOUT, *names, "--rollout.max_prompt_length", "120"]

    def set_template(self, text: str) -> None:
        path = self.model / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": text}))

    def edit_line(self, number: int, edit: Callable[[str], str]) -> None:
        lines = self.data.read_text().splitlines(keepends=True)
        lines[number - 1] = edit(lines[number - 1])
        self.data.write_text("".join(lines))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    write_checkpoint(folder / "model")
    write_problems(folder / "problems.jsonl", 24)
    return folder


@pytest.fixture
def inputs(pristine: Path, tmp_path: Path) -> Inputs:
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    return Inputs(tmp_path)


@pytest.fixture
def command(monkeypatch, refused) -> Callable[..., str]:
    """Runs the command on two of the tests' devices; returns the sentence it refuses with."""

    def refuse(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train", *options])
        monkeypatch.setattr(body, "configure", lambda count: jax.devices()[: count or 8])
        monkeypatch.setattr(body, "opened", lambda *_: pytest.fail("the run began"))
        return refused(lambda: run_command(train.main))

    return refuse


def small_embedding(inputs: Inputs) -> None:
    shutil.rmtree(inputs.model)
    write_checkpoint(inputs.model, replace(QWEN3, vocab_size=200))


def cut_line(inputs: Inputs) -> None:
    inputs.edit_line(9, lambda line: line[:20] + "\n")


def nothing_held_out(inputs: Inputs) -> None:
    lines = inputs.data.read_text().splitlines(keepends=True)
    kept = [x for x in lines if subset_of(json.loads(x)["question"], HELDOUT_SHARE) is Subset.TRAIN]
    inputs.data.write_text("".join(kept))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda x: (x.model / WEIGHTS).unlink(), ["{model}", WEIGHTS, "expected one of them"]),
        (
            lambda x: (x.model / "generation_config.json").write_text('{"eos_token_id": [0, 304]}'),
            ["{model}", "end-of-sequence token 304", "the model's 300 embedding rows"],
        ),
        (small_embedding, ["{model}", "largest token id is 261", "expected at least 262"]),
        (lambda x: (x.model / "tokenizer.json").unlink(), ["{model}", "no tokenizer files"]),
        (cut_line, ["{data}, line 9, column", "broken JSON", "one complete object on each line"]),
        (lambda x: x.set_template("{{ 1 / 0 }}"), ["{data}, line 1", "chat template fails ("]),
        (nothing_held_out, ["{data} (held-out", "no prompts to evaluate", "--eval.every 0"]),
        (lambda x: x.data.unlink(), ["--data", "{data}", "give .json, .jsonl or .parquet files"]),
        (lambda x: shutil.rmtree(x.model), ["--model", "{model}", "checkpoint directory"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_files(inputs: Inputs, command, damage: Callable[[Inputs], None], words: list[str]):
    damage(inputs)
    message = command(*inputs.options, "--run_dir", str(inputs.run_dir))
    for word in words:
        assert word.format(model=inputs.model, data=inputs.data) in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--layout dp3tp1", ["--layout is 'dp3tp1'", "2 devices have the layouts dp2tp1, dp1tp2"]),
        ("--layout dp1tp8 --devices 8", ["--layout is 'dp1tp8'", "num_heads", "divisible by 4"]),
        (
            "--train false --rollout.prompts_per_step 5 --rollout.num_generations 1"
            " --algorithm.mini_batch_size 5",
            ["prompts_per_step x --rollout.num_generations is 5", "multiple of 2", "dp2tp1"],
        ),
        ("--layout dp1tp2@4,dp4tp4@2", ["--layout is 'dp4tp4'", "dp1tp2"]),
        ("--reward no_such_module:score", ["'no_such_module:score'", "no_such_module"]),
        ("--reward maths", ["--reward is 'maths'", "expected exact, math"]),
        ("--warm_start.steps 3", ["--warm_start.steps is 3", "no demonstrations", "set it to 0"]),
        ("--data arithmetic", ["--data is 'arithmetic'", "its own tokenizer", "a built-in model"]),
        ("--eval.data {data} --eval.every 0", ["--eval.data is '{data}'", "which never evaluates"]),
        ("--data {model}", ["data file {model} is a folder", "name the files in it"]),
        ("--data.prompt_key q.x", ["--data.prompt_key is 'q.x'", "{data} has the columns"]),
        ('--data.chat_template_kwargs {{"a":1}}', ["{model}: the chat template has no", "'a'"]),
        ("--model tiny", ["--data is", "no Hugging Face checkpoint directory"]),
        ("--rollout.max_prompt_length 8", ["expected some problems"]),
        (
            "--rollout.max_completion_length 393",
            ["is 120 + 393 = 513: expected at most the 512", "--rollout.max_completion_length 392"],
        ),
        ("--checkpoint.export_dir {model}", ["{model}: the directory is not empty, expected"]),
        ("--checkpoint.export_dir {run_dir}", ["--checkpoint.export_dir", "a folder of its"]),
        ("--run_dir {model}", ["--run_dir is '{model}'", "expected another name than --model"]),
        ("--run_dir {data}/x/y", ["--run_dir", "expected a folder that can be written", "{data}"]),
        ("--run_dir {model} --resume", ["'{model}'", "expected the folder of a run to resume"]),
        ("--rollout.top_k 301", ["--rollout.top_k is 301", "at most the 300 tokens of the model"]),
    ],
)
def test_options(inputs: Inputs, command, options: str, words: list[str]):
    names = {"model": inputs.model, "data": inputs.data, "run_dir": inputs.run_dir}
    given = [word.format(**names) for word in options.split()]
    message = command(*inputs.options, "--run_dir", str(inputs.run_dir), *given)
    for word in words:
        assert word.format(**names) in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model tinny", ["model 'tinny'", "expected one of", "the nearest is 'tiny'"]),
        ("--data.answer_key a", ["--data.answer_key is 'a'", "nothing with the built-in task"]),
        ("--eval.data a", ["--eval.data is 'a'", "problems of its own"]),
        ("--rollout.max_prompt_length 20", ["max_prompt_length is 20", "have up to", "at least"]),
    ],
)
def test_options_of_the_built_in_task(tmp_path: Path, command, options: str, words: list[str]):
    message = command(*TINY, "--run_dir", str(tmp_path / "run"), *options.split())
    assert all(word in message for word in words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model demo", ["of another model", "embed_dim (32 there, ", "here)", "--model"]),
        ("--algorithm.beta 0.1", ["has_reference (False there, ", "algorithm.beta 0.0 -> 0.1"]),
        ("--lora.rank 4", ["lora.rank (nothing there, 4 here)", "lora.rank 0 -> 4"]),
        ("--algorithm.name ppo", ["has_critic", "algorithm.name grpo -> ppo"]),
        ("--optimizer.moment_dtype bfloat16", ["optimizer.moment_dtype float32 -> bfloat16"]),
    ],
)
def test_a_checkpoint_of_another_model(tmp_path: Path, command, options: str, words: list[str]):
    run_dir = tmp_path / "run"
    config = parse([*TINY, "--run_dir", str(run_dir)])
    fingerprint = build(config, jax.devices()[:2]).fingerprint
    with Checkpointer(run_dir / CHECKPOINTS, fingerprint=fingerprint) as checkpoints:
        checkpoints.save(2, {"x": jnp.zeros(3)}, {})
    (run_dir / CONFIG_FILE).write_text(dump(config))
    message = command("--run_dir", str(run_dir), "--resume", *options.split())
    assert all(word in message for word in [str(run_dir), *words])


def test_what_the_refusal_of_long_responses_advises_is_taken(inputs: Inputs):
    advised = ["--rollout.max_completion_length", "392", "--rollout.min_length", "512"]
    setup = build(parse([*inputs.options, *advised]), jax.devices()[:2])
    assert setup.engine.specs.buckets.lengths[-1] == 512


def test_under_auto_a_layout_that_cannot_be_is_dropped_with_one_reason(inputs: Inputs):
    config = parse([*inputs.options, "--devices", "8"])
    setup = build(config, jax.devices())
    assert [str(split) for split in setup.layouts] == ["dp8tp1", "dp4tp2", "dp2tp4"]
    (reason,) = setup.dropped
    assert "dp1tp8 needs num_heads / num_kv_heads = 2 divisible by 4" in reason
