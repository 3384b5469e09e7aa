"""The table of roles by options alone: no device, no file."""

from dataclasses import replace

import pytest
from runs import TINY

from pat_jax.config.command_line import parse
from pat_jax.config.compute import Compute
from pat_jax.config.role_table import (
    CRITIC,
    POLICY,
    REFERENCE,
    TEACHER,
    Role,
    role_table,
    tuned_roles,
)
from pat_jax.config.run import RunConfig
from pat_jax.config.sft import SftConfig

PPO = ["--algorithm.name", "ppo"]


def table(*options: str) -> dict[str, Role]:
    config = parse([*TINY, "--compute_dtype", "bfloat16", "--run_dir", "unused", *options])
    return {role.name: role for role in role_table(config, "cuda")}


def test_a_run_has_the_roles_that_its_options_name():
    assert [*table()] == [POLICY]
    assert [*table("--algorithm.beta", "0.1")] == [POLICY, REFERENCE]
    scored = table(*PPO, "--algorithm.beta", "0.1", "--reward", "exact", "model:a", "model:b")
    assert [*scored] == [POLICY, CRITIC, REFERENCE, "model:a", "model:b"]
    distilled = ["--algorithm.name", "distill", "--teacher.model", "t"]
    assert [*table(*distilled)] == [POLICY, TEACHER]
    assert [*table(*PPO, "--train", "false", "--warm_start.steps", "0")] == [POLICY]


@pytest.mark.parametrize(
    ("options", "source", "option"),
    [
        ([], "", "reward"),  # the policy
        (["--reward", "exact", "model:judge", "model:other"], "judge", "reward"),
        (["--reward", "model:judge", "--critic.model", "c"], "c", "critic.model"),
        (["--critic.model", "tiny"], "", "critic.model"),
    ],
)
def test_a_critic_begins_as_the_first_model_that_is_named(options, source, option):
    critic = table(*PPO, *options)[CRITIC]
    assert (critic.source, critic.option, critic.head) == (source, option, "scalar")


def test_no_option_of_one_role_reaches_another():
    options = [*PPO, "--algorithm.beta", "0.1", "--reward", "model:judge", "--remat", "none"]
    options += ["--scan_layers", "true", "--lora.rank", "4", "--critic.learning_rate", "0.5"]
    options += ["--critic.warmup_steps", "1", "--compute_dtype", "float32"]
    found = table(*options, "--algorithm.router_replay", "true")
    assert [name for name, role in found.items() if role.replays_routes] == [POLICY]
    assert found["model:judge"].compute == Compute("bfloat16")
    policy, critic = found[POLICY].trained, found[CRITIC].trained
    assert policy and critic and policy.lora.is_on and not critic.lora.is_on
    assert critic.optimization.optimizer.learning_rate == 0.5
    assert policy.optimization.optimizer.learning_rate != 0.5
    assert policy.optimization.optimizer.warmup_steps == 0
    assert {name for name, role in found.items() if role.trained} == {POLICY, CRITIC}


def test_the_policy_is_read_before_an_update_where_it_is_compared():
    def is_read(*options: str) -> bool:
        return table(*options)[POLICY].is_read

    distilled = ["--algorithm.name", "distill", "--teacher.model", "t"]
    assert not is_read() and not is_read("--algorithm.beta", "0.1", "--algorithm.kl_in", "loss")
    assert is_read("--algorithm.beta", "0.1", "--algorithm.kl_in", "reward")
    assert is_read(*distilled) and not is_read(*distilled, "--teacher.top_k", "4")


def test_steps_of_an_optimizer_are_those_of_its_model():
    options = [*PPO, "--steps", "5", "--critic.pretrain_steps", "2", "--warm_start.steps", "3"]
    found = table(*options, "--algorithm.mini_batch_size", "2")
    policy, critic = found[POLICY].trained, found[CRITIC].trained
    assert policy and critic and policy.supervised
    assert (policy.optimization.steps, critic.optimization.steps) == (6, 10)
    assert policy.supervised.steps == 3 and critic.supervised is None
    assert policy.supervised.optimizer.moment_dtype == "float32"


def test_names_in_checkpoints_are_those_of_older_runs():
    assert [role.key for role in table(*PPO).values()] == ["train", "critic"]


def test_a_run_that_learns_from_files_has_a_policy_and_the_reference_of_its_loss():
    config = SftConfig(model="m", compute_dtype="float32")
    assert [x.name for x in tuned_roles(config, "vocab", 7, has_reference=False)] == [POLICY]
    policy, reference = tuned_roles(config, "vocab", 7, has_reference=True)
    assert policy.trained and policy.trained.optimization.steps == 7
    assert reference == replace(reference, name=REFERENCE, source="", trained=None)


def test_options_are_values():
    config = RunConfig(compute_dtype="float32")
    assert role_table(config, "cpu") == role_table(config, "cpu")
