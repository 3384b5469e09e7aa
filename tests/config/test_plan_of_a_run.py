"""`plan --config` takes the YAML of a training run: the plan is one of that run."""

from pathlib import Path

import pytest

from pat_jax.common.errors import UserError
from pat_jax.common.options.declared import options_of
from pat_jax.config import command_line as cli
from pat_jax.config.run import RunConfig
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
    rollout, algorithm = found.rollout, found.algorithm
    assert (rollout.num_responses, rollout.num_generations) == (1024, 16)
    assert (rollout.max_prompt_length, rollout.weights) == (200, "int8")
    assert rollout.max_completion_length == 1024  # that of a run which does not set it
    assert (algorithm.name, algorithm.baseline, algorithm.beta) == ("ppo", "critic", 0.01)
    assert (algorithm.mini_batch_size, algorithm.tokens_per_micro_batch) == (16, 4096)
    assert (found.lora.rank, found.optimizer.moment_dtype) == (8, "bfloat16")
    assert (found.critic.model, found.critic.lora.rank) == ("some/critic", 8)
    assert found.reward == ("math", "model:some/judge") and found.run_dir == ""
    settled, _ = found.settled(32_768)
    assert (settled.compute_dtype, settled.prompt_tokens) == ("bfloat16", 200)


def test_what_a_plan_does_not_read_has_its_default(plan):
    found, usual = plan(RUN), PlanConfig()
    assert (found.data, found.eval, found.optimizer.learning_rate) == (usual.data, usual.eval, None)
    assert found.lora.alpha == 0


def test_what_the_run_leaves_open_is_as_in_the_run(plan):
    found = plan("data: a.jsonl\nnum_generations: 4\n")
    assert found.rollout.num_responses == 32 * 4 and found.model == PlanConfig().model
    run = RunConfig()
    assert found.algorithm.tokens_per_micro_batch == run.algorithm.tokens_per_micro_batch
    for name in ("min_length", "check_every", "burst_steps", "prefill_blocks", "page_size"):
        assert getattr(found.rollout, name) == getattr(run.rollout, name)


def test_later_options_win(plan):
    found = plan(RUN, "--responses", "256", "--num_generations=8", "--beta", "0")
    assert (found.rollout.num_responses, found.rollout.num_generations) == (256, 8)
    assert found.algorithm.beta == 0


def test_what_the_run_leaves_open_follows_later_options(plan):
    run = "model: llama-3.1-8b\ndata: x.json\n"
    assert plan(run, "--responses=512").mini_batch_size == 512 // 8
    assert plan(run, "--num_generations=3").rollout.num_responses == 32 * 3
    assert plan(run, "--max_prompt_length=128").settled(8192)[0].prompt_tokens == 128
    assert not plan(RUN, "--train=false", "--lora.rank=0").train


@pytest.mark.parametrize("preset", ["qwen2.5-0.5b", "ppo"])
def test_the_folder_of_a_run_can_be_planned(plan, preset: str):
    """Its config.yaml has every option of the run."""
    run = cli.parse(["--preset", preset, "--steps", "100"])
    read = {one.name: one.default for one in options_of(plan(cli.dump(run)))}
    for option in options_of(run):
        if option.name in read.keys() - {"run_dir", "profile"} and option.default is not None:
            assert read[option.name] == option.default, option.name


def test_a_plans_own_yaml_is_one(plan):
    found = plan(
        "target: h100:2\nresponses: 64\ndraft_acceptance: 0.5\nspeculation: {source: model:x}\n"
    )
    assert (found.target, found.responses, found.draft_acceptance) == ("h100:2", 64, 0.5)
    assert found.rollout.max_completion_length is None and found.rollout.min_length == 1024
    asked = ["--algorithm", "ppo", "--kl_in=loss", "--kl_estimator=k3", "--responses=64"]
    found = cli.parse([*asked, "--profile=p.json"], PlanConfig, presets=None)
    assert plan(cli.dump(found)) == found


def test_an_option_of_a_run_is_planned_or_named(plan, capsys):
    found = plan("layout: dp2tp2\nprofile: p.json\ndevice_memory_gib: 40\nseed: 3\n")
    assert (found.rollout.device_memory_gib, found.seed, found.profile) == (40, 3, "")
    assert "--layout, --profile\n" in capsys.readouterr().err
    assert plan("data: a\nalgorithm: {baseline: critic}\n").algorithm.has_critic
    assert plan("data: a\nlora: {adapter: a}\n", "--lora.rank=4").lora.rank == 4
    assert plan("data: a\nlora: {adapter: a, rank: 8}\n").lora.rank == 8
    assert plan("data: a\nlora: {adapter: a}\n", "--train=false").lora.rank == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "data: a\nrollout: {tempature: 1}\n",
            r"--rollout\.tempature in \S+, line 2: did you mean",
        ),
        (
            "data: a\nrollout: {num_generations: 0}\n",
            r"option --rollout\.num_generations is 0 in \S+, line 2: expected",
        ),
        (
            "data: a\nrollout: {prompts_per_step: 16384}\n",
            r"--rollout\.prompts_per_step is 16384 in \S+, line 2: expected at most 8,192",
        ),
        ("steps: 5\nlora: {adapter: a}\n", r"adapter is 'a' in \S+, line 2: expected --lora\.rank"),
        (
            "data: a\nalgorithm: {distill_coef: 0.5}\n",
            r"teacher\.model is '': expected a model that teaches",
        ),
    ],
)
def test_a_mistake_in_a_runs_yaml_names_the_file(plan, text: str, sentence: str):
    with pytest.raises(UserError, match=sentence):
        plan(text)
