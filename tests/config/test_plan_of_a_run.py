"""`plan --config` takes the YAML of a training run: the plan is one of that run."""

from pathlib import Path

import pytest

from pat_jax.common.errors import UserError
from pat_jax.config import command_line as cli
from pat_jax.profiling.capacity.plan_config import PlanConfig

RUN = """
model: Qwen/Qwen3-8B
data: openai/gsm8k:main/train
reward: [math, model:some/judge]
run_dir: runs/mine
devices: 4
layout: dp2tp2
compute_dtype: auto
rollout: {prompts_per_step: 64, num_generations: 16, max_prompt_length: 200, weights: int8}
algorithm: {name: ppo, beta: 0.01, mini_batch_size: 16, tokens_per_micro_batch: 4096}
lora: {rank: 8, alpha: 32}
critic: {model: some/critic, lora: {rank: 8}}
optimizer: {moment_dtype: bfloat16, learning_rate: 1e-5}
eval: {every: 5}
"""


@pytest.fixture
def plan(tmp_path: Path):
    def planned(text: str, *argv: str) -> PlanConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return cli.parse(["--config", str(path), *argv], PlanConfig, presets=None)

    return planned


def test_a_plan_has_what_the_run_has(plan):
    found = plan(RUN, "--target", "a100:4")
    assert (found.model, found.target) == ("Qwen/Qwen3-8B", "a100:4")
    assert (found.responses, found.num_generations, found.max_prompt_length) == (1024, 16, 200)
    assert found.max_completion_length == 1024  # that of a run which does not set it
    assert (found.beta, found.mini_batch_size, found.tokens_per_micro_batch) == (0.01, 16, 4096)
    assert (found.lora_rank, found.weights, found.optimizer.moment_dtype) == (8, "int8", "bfloat16")
    assert (found.algorithm.name, found.critic.model, found.critic.lora.rank) == (
        "ppo",
        "some/critic",
        8,
    )
    assert found.reward == ("model:some/judge",) and found.run_dir == ""
    assert found.compute_dtype == "bfloat16"


def test_what_the_run_leaves_open_is_its_default_or_the_plans(plan):
    found = plan("data: a.jsonl\nnum_generations: 4\n")
    assert (found.responses, found.num_generations) == (32 * 4, 4)
    assert found.model == PlanConfig().model and found.min_length == PlanConfig().min_length


def test_later_options_win(plan):
    found = plan(RUN, "--responses", "256", "--num_generations=8", "--beta", "0")
    assert (found.responses, found.num_generations, found.beta) == (256, 8, 0)


def test_what_the_run_leaves_open_follows_later_options(plan):
    run = "model: llama-3.1-8b\ndata: x.json\n"
    assert plan(run, "--responses=512").mini_batch_size == 0
    saved = cli.dump(cli.parse(["--model=m", "--data=d", "--algorithm.mini_batch_size=32"]))
    assert plan(saved, "--responses=128").mini_batch_size == 0
    assert plan(run, "--max_prompt_length=128").prompt_tokens == 128
    assert plan(run, "--num_generations=3").responses == 32 * 3
    assert not plan(run, "--train=false", "--compile=false").train
    rollouts = plan(RUN, "--train=false")
    assert not (rollouts.train or rollouts.beta or rollouts.reward or rollouts.lora_rank)


def test_the_folder_of_a_run_can_be_planned(plan):
    """Its config.yaml has every option of the run."""
    run = cli.parse(["--preset", "qwen2.5-0.5b", "--steps", "100"])
    found = plan(cli.dump(run))
    assert found.model == run.model
    assert found.responses == run.rollout.prompts_per_step * run.rollout.num_generations


def test_a_run_that_only_generates_trains_nothing_in_its_plan(plan):
    found = plan("data: a.jsonl\ntrain: false\nrollout: {max_prompt_length: 64}\n")
    assert not found.train and found.mini_batch_size == 0


def test_a_plans_own_yaml_is_one(plan):
    found = plan(
        "target: h100:2\nresponses: 64\ndraft_acceptance: 0.5\nspeculation: {source: model:x}\n"
    )
    assert (found.target, found.responses, found.draft_acceptance) == ("h100:2", 64, 0.5)
    assert found.max_completion_length is None


def test_an_option_of_a_run_is_planned_or_named(plan, capsys):
    found = plan("layout: dp2tp2\nprofile: p.json\ndevice_memory_gib: 40\nseed: 3\n")
    assert (found.device_memory_gib, found.seed, found.profile) == (40, 3, "")
    assert "--layout" in (line := capsys.readouterr().err) and "--profile" in line
    assert plan("algorithm: {baseline: critic}\n", "--algorithm.name=ppo").has_critic
    assert plan("data: a\nlora: {adapter: a}\n", "--lora_rank=4").lora_rank == 4
    assert plan("data: a\nlora: {adapter: a, rank: 8}\n").lora_rank == 8
    assert plan("data: a\nlora: {adapter: a}\n", "--train=false").lora_rank == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "data: a\nrollout: {tempature: 1}\n",
            r"--rollout\.tempature in \S+, line 2: did you mean",
        ),
        (
            "data: a\nrollout: {top_p: 7}\n",
            r"option --rollout\.top_p is 7\.0 in \S+, line 2: expected",
        ),
        (
            "data: a\nrollout: {prompts_per_step: 16384}\n",
            r"--responses is 131072 in \S+: expected",
        ),
        (
            "layout: auto\nresponses: 2048\ndevice_memory_gib: 40\n",
            r"--responses in \S+, line 2 is not of a training run, as --layout is: give it on",
        ),
        ("steps: 5\nlora: {adapter: a}\n", r"adapter is 'a' in \S+, line 2: expected --lora\.rank"),
        ("algorithm: {baseline: critic}\n", r"baseline is 'critic' in \S+, line 1: expected group"),
        (
            "algorithm:\n  name: ppo\n  baseline: group\n",
            r"baseline is 'group' in \S+, line 3: expected critic as with --algorithm\.name ppo",
        ),
        (
            "teacher: {model: t}\nalgorithm: {distill_coef: 0.5}\n",
            r"distill_coef is 0\.5 in \S+, line 2: expected 0\.0",
        ),
    ],
)
def test_a_mistake_in_a_runs_yaml_names_the_file(plan, text: str, sentence: str):
    with pytest.raises(UserError, match=sentence):
        plan(text)
