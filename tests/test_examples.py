"""The examples run, and what they show is so."""

import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from runs import QWEN3, ROOT, SMALL_ROLLOUT, TINY, write_checkpoint

from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.prompt_lines import parse_ask
from pat_jax.batch_generation.prompts import PromptFile
from pat_jax.config.command_line import parse
from pat_jax.config.sft import RewardModelConfig, SftConfig
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.problem_sets import load_problem_sets
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.data.arithmetic import TOKENIZER, solve, worked
from pat_jax.rl.rewards.rewards import resolve_reward
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.sft.setup import build as build_sft
from pat_jax.run.start.setup import build
from pat_jax.training.trainer import REINFORCED, SUPERVISED

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("examples") / "model")


def test_lessons_can_be_learned_and_some_are_held_out(model: Path):
    files = ["--model", str(model), "--data", str(EXAMPLES / "lessons.jsonl"), "--run_dir", "x"]
    built = build_sft(parse(files, SftConfig, presets=None), jax.devices()[:1])
    assert len(built.lessons.heldout) > 0 and built.steps > 0
    assert "left out: 0 longer" in built.note


@pytest.mark.parametrize("config_class", [RewardModelConfig, SftConfig])
def test_pairs_can_be_learned_and_some_are_held_out(model: Path, config_class):
    files = ["--model", str(model), "--data", str(EXAMPLES / "pairs.jsonl"), "--run_dir", "x"]
    files += ["--loss", "dpo"] * (config_class is SftConfig)
    built = build_sft(parse(files, config_class, presets=None), jax.devices()[:1])
    assert len(built.lessons.heldout) > 0 and built.steps > 0
    assert "left out: 0 with" in built.note


def test_problems_can_be_asked(model: Path):
    files = ["--model", str(model), "--data", str(EXAMPLES / "problems.jsonl"), "--out", "x"]
    config = parse(files, EvaluateConfig, presets=None)
    problem_sets = load_problem_sets(
        config.run_config(QWEN3, 1).task, HuggingFaceTokenizer(str(model))
    )
    (problems,) = problem_sets.sets
    rows = (EXAMPLES / "problems.jsonl").read_text().splitlines()
    assert len(problems.prompts) == len(rows) > 10 and problem_sets.rewards == ["math"]


def test_prompts_can_be_continued(model: Path):
    tokenizer, nothing = HuggingFaceTokenizer(str(model)), SamplingOverrides()
    lines = [json.loads(line) for _, line in PromptFile(EXAMPLES / "prompts.jsonl")]
    asks = [parse_ask(line, nothing, nothing, tokenizer, max_length=2048) for line in lines]
    assert len(asks) == 3


def module_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_pairs_of_arithmetic_have_a_right_and_a_wrong_answer():
    rows = list(module_of("arithmetic_pairs").pairs(300, 0, "train"))
    assert len({row["prompt"] for row in rows}) > 250
    for row in rows:
        assert row["chosen"] == worked(row["prompt"])
        assert row["rejected"][-2] == "#" and row["rejected"][-1] != solve(row["prompt"])
        TOKENIZER.encode(row["rejected"])
    lengths = [len(row["rejected"]) - len(row["chosen"]) for row in rows]
    assert lengths.count(0) > 100 and lengths.count(-7) > 40  # another value, a term left out


SOFT_LIMIT = ["--algorithm.loss", f"{EXAMPLES / 'loss.py'}:SoftLimit"]


def test_a_loss_of_ones_own_is_what_a_run_learns_by():
    config = parse([*TINY, *SOFT_LIMIT, "--algorithm.epsilon", "0.4", "--run_dir", "x"])
    trainer = build(config, jax.devices()[:2]).trainer
    loss = trainer.updates[REINFORCED].loss
    assert repr(loss) == "SoftLimit(strength=0.5)" and trainer.predicts  # the old log-probabilities
    assert trainer.updates[SUPERVISED].loss == PolicyLoss(epsilon=0.4, is_on_policy=True)
    logprobs, old = jnp.float32([[-1, -2, -3]]), jnp.float32([[-1, -1, -2.5]])
    columns = {"advantages": jnp.float32([[1, -1, 2]]), "old_logprobs": old}
    weights = jnp.float32([[0.5, 0.5, 0]])
    value, sums = loss({"logprobs": logprobs, "entropy": -logprobs}, columns, weights)
    np.testing.assert_allclose(value, 0.5 * -1 + 0.5 * (np.exp(-1) + 0.25), rtol=1e-6)
    assert float(sums["log_ratio_max"]) == 1


@pytest.mark.parametrize(
    ("name", "completions", "scores"),
    [
        ("follows_format", ["<think>3+4</think>\n<answer>7</answer>", "7"], [1, 0]),
        ("right_number", ["So 1,234.", "12 or 34", "none"], [1, 0.1, 0]),
        ("passes_tests", ["```python\ndef add(a, b):\n    return a + b\n```", "a + b"], [1, 0]),
    ],
)
def test_rewards_of_ones_own_score_responses(name: str, completions: list[str], scores):
    function = resolve_reward(f"{EXAMPLES / 'rewards.py'}:{name}")
    count = len(completions)
    columns = {"answer": ["1234"] * count, "ground_truth": ["assert add(2, 3) == 5"] * count}
    assert function(prompts=["?"] * count, completions=completions, **columns) == scores


def test_a_response_without_tests_is_not_scored_by_tests():
    function = resolve_reward(f"{EXAMPLES / 'rewards.py'}:passes_tests")
    assert function(prompts=["?"], completions=["1"], ground_truth=[None]) == [None]


def test_the_yaml_of_a_run_builds_one_with_another_model_and_data(model: Path):
    words = ["--config", str(EXAMPLES / "gsm8k.yaml"), "--run_dir", "x", "--model", str(model)]
    problems = str(EXAMPLES / "problems.jsonl")
    words += ["--data", problems, "--eval.data", problems, "--layout", "dp1tp1"]
    words += ["--prompts_per_step", "16", "--max_prompt_length", "440"]
    config = parse([*words, "--max_completion_length", "64"])
    assert config.algorithm.name == "dapo" and config.lora.rank == 16
    for reward in config.reward:
        assert callable(resolve_reward(reward.replace("examples/", f"{EXAMPLES}/")))
    built = build(config, jax.devices()[:1])
    assert built.config.rollout.num_generations == 8


def test_the_script_for_slurm_is_a_script_of_a_run():
    script = (EXAMPLES / "slurm.sh").read_text()
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"], check=True)
    (command,) = re.findall(
        r"^srun python -m pat_jax.train (.*)$", script.replace("\\\n", ""), re.M
    )
    assert "--resume auto" in command  # which the command reads, before the options are
    config = parse(shlex.split(command.replace("auto", "true")))
    assert config.run_dir.startswith("$SHARED/")


def test_the_manifest_for_kubernetes_names_each_process_of_a_run():
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (command,) = pod["containers"][0]["args"]
    words = command.replace("$JOB_COMPLETION_INDEX", "1").replace("--resume auto", "--resume true")
    begin = "exec python -m pat_jax.train "
    assert words.startswith(begin) and "--resume auto" in command
    processes = parse(shlex.split(words.removeprefix(begin))).distributed
    assert processes.num_processes == spec["completions"] == spec["parallelism"]
    named, name = service["metadata"]["name"], job["metadata"]["name"]
    assert processes.coordinator.startswith(f"{name}-0.{named}.") and pod["subdomain"] == named
    assert service["spec"]["selector"] == {"job-name": name}


@pytest.mark.slow  # a run that learns
@pytest.mark.parametrize("own", [[], SOFT_LIMIT], ids=["options", "own"])
def test_the_flat_grpo_learns(monkeypatch, capsys, own):
    example = module_of("grpo")
    # The process has its eight devices already.
    monkeypatch.setattr(example, "configure", lambda count: jax.devices()[:count])
    options = ["--model", "tiny", *SMALL_ROLLOUT, "--rollout.max_completion_length", "40"]
    options += ["--rollout.prompts_per_step", "16", "--algorithm.mini_batch_size", "16"]
    options += ["--optimizer.learning_rate", "2e-3"]
    config = parse([*example.DEFAULTS, *options, *own, "--steps", "8"])
    means = example.train(config)
    assert len(means) == 8 and min(means[-2:]) > means[0] + 0.2
    assert "step 8: reward" in capsys.readouterr().out
