"""What a critic may be, and the sentence for what it may not."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import QWEN3, SMALL_ROLLOUT, TINY, write_checkpoint, write_problems

from pat_jax.common.errors import UserError
from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import parse
from pat_jax.config.role_table import CRITIC, REFERENCE
from pat_jax.models.config import ExpertsConfig
from pat_jax.run.process.distributed import _check_places
from pat_jax.run.roles.role_params import freeze_bases, initial_states
from pat_jax.run.start.setup import Setup, build
from pat_jax.training.update_memory import check_state, resident_bytes

PPO = "--algorithm.name ppo"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--critic.model x", ["--critic.model is 'x'", "baseline group, which has no critic"]),
        ("--critic.lora.rank 4", ["--critic.lora.rank is 4", "baseline group"]),
        ("--algorithm.lam 0.9", ["--algorithm.lam is 0.9", "0.95", "baseline group"]),
        ("--algorithm.whiten_rewards true", ["--algorithm.whiten_rewards", "no critic"]),
        (f"{PPO} --algorithm.scale_rewards group", ["scale_rewards", "whiten_advantages"]),
        (f"{PPO} --algorithm.dynamic_sampling 2", ["dynamic_sampling", "baseline critic"]),
        (f"{PPO} --algorithm.kl_target 0.1", ["--algorithm.kl_target", "--algorithm.beta"]),
        (f"{PPO} --algorithm.kl_horizon 99", ["kl_horizon", "--algorithm.kl_target"]),
        (
            f"{PPO} --algorithm.beta 0.1 --algorithm.kl_target 1 --algorithm.kl_horizon 2",
            ["--algorithm.kl_horizon is 2", "more than a fifth of an iteration's 128 responses"],
        ),
        ("--algorithm.normalize_reward true", ["normalize_reward", "scale_rewards group"]),
        (f"{PPO} --critic.pretrain_steps 60", ["--critic.pretrain_steps", "less than the 60"]),
        (f"{PPO} --critic.warmup_steps 61", ["--critic.warmup_steps is 61", "at most the 60"]),
        (f"{PPO} --critic.lora.rank 4", ["--critic.lora.rank is 4", "--warm_start.steps"]),
        (f"{PPO} --critic.lora.rank 4 --critic.model demo", ["rank is 4", "--warm_start.steps"]),
        (f"{PPO} --rollout.temperature 0", ["--rollout.temperature", "above 0"]),
    ],
)
def test_options_that_have_no_effect_or_no_sense_are_refused(options: str, words: list[str]):
    with pytest.raises(OptionError) as error:
        parse(["--preset", "demo", *options.split()])
    sentence = str(error.value)
    assert all(part in sentence for part in words) and "\n" not in sentence


ROUTED = replace(QWEN3, architecture="qwen3_moe", experts=ExpertsConfig(4, 2, 16))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("critics")
    write_problems(folder / "problems.jsonl")
    return write_checkpoint(folder / "policy")


def built(policy: Path, *options: str) -> Setup:
    data = ["--data", str(policy.parent / "problems.jsonl"), "--model", str(policy)]
    lengths = ["--rollout.max_prompt_length", "128", "--eval.every", "0", "--profile", "none"]
    words = [*data, *SMALL_ROLLOUT, *lengths, *PPO.split(), "--layout", "dp2tp1", *options]
    return build(parse([*words, "--run_dir", "unused"]), jax.devices()[:2])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, ["no such directory"]),
        (replace(QWEN3, vocab_size=200), ["embeds", "this one embeds 200"]),
        (replace(QWEN3, max_position=64), ["184 tokens of the longest prompt and response", "64"]),
    ],
)
def test_a_critic_that_cannot_read_the_policys_tokens_is_refused(policy, tmp_path, config, words):
    other = tmp_path / "other"
    if config is not None:
        write_checkpoint(other, config)
    with pytest.raises(UserError) as error:
        built(policy, "--critic.model", str(other))
    sentence = str(error.value)
    assert all(part in sentence for part in ["--critic.model", *words]) and "\n" not in sentence


def test_a_missing_reward_model_is_told_by_the_option_that_names_it(policy: Path):
    with pytest.raises(UserError, match=r"^option --reward is 'judge': .* no such directory"):
        built(policy, "--reward", "model:judge")  # where the critic begins, too


def test_a_critic_with_other_tokens_is_refused(policy: Path, tmp_path: Path):
    other = write_checkpoint(tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"<im>"', '"<mi>"'))
    with pytest.raises(
        UserError,
        match=r"--critic\.model .* but token \d+ is '<im>' there and '<mi>' in the critic",
    ):
        built(policy, "--critic.model", str(other))


def test_a_critic_is_not_written_where_the_policy_is(tmp_path: Path):
    folder = str(tmp_path / "x")
    same = ["--critic.export_dir", folder, "--checkpoint.export_dir", folder]
    config = parse(["--preset", "ppo", *same, "--run_dir", str(tmp_path / "run")])
    with pytest.raises(OptionError, match=r"--critic\.export_dir is .*another folder than"):
        _check_places(config)


def test_policy_reference_and_critic_share_one_frozen_base(policy: Path):
    """The same arrays, counted once."""
    lora = ["--lora.rank", "2", "--critic.lora.rank", "2", "--algorithm.beta", "0.1"]
    shared, apart = built(policy, *lora), built(policy, *lora[2:])
    roles = shared.roles
    trained = roles.policy.trained
    assert roles.critic and apart.roles.critic
    for role in roles.trained:
        role.programs.compile_all(
            threads=1, only=lambda key: key.name in ("init_state", "base_checksum")
        )
    checksums = freeze_bases(roles, 0)
    assert checksums.keys() == {"base_checksum", "critic_base_checksum"}
    assert None not in checksums.values()
    mine = {id(x) for x in jax.tree.leaves(trained.frozen)}
    theirs = jax.tree.leaves(roles.critic.trained.frozen)
    assert sum(id(x) in mine for x in theirs) == len(theirs) - 1  # all but the head, which is zeros
    state = roles.policy["init_state"](trained.init(0))
    critic = initial_states(roles, state, 0)["critic"]
    assert {"score"} < critic.params.keys() and not np.any(critic.params["score"])
    assert resident_bytes(roles.critic) < resident_bytes(apart.roles.critic)


@pytest.mark.parametrize(
    "options",
    [
        ["--experts", "gathered"],
        ["--experts", "exchanged"],
        ["--rollout.expert_parallel", "2"],
        ["--rollout.expert_parallel", "1", "--rollout.expert_width", "2"],
    ],
    ids=" ".join,
)
def test_options_for_the_policys_experts_are_none_of_a_dense_critic(policy, tmp_path, options):
    routed = write_checkpoint(tmp_path / "routed", ROUTED)
    roles = built(policy, "--model", str(routed), "--critic.model", str(policy), *options).roles
    assert roles.policy.policy.config.experts is not None
    assert roles.critic is not None and roles.critic.policy.config.experts is None


def test_a_reference_on_fewer_devices_divides_its_experts_as_these_can(policy: Path, tmp_path):
    routed = write_checkpoint(tmp_path / "routed", ROUTED)
    options = ["--algorithm.beta", "0.1", "--placement.reference", "1"]
    roles = built(policy, "--model", str(routed), *options, "--rollout.expert_parallel", "2").roles
    assert len(roles.policy.layout.devices) == 2
    assert roles.readers[REFERENCE].devices == {jax.devices()[1]}


def test_what_all_roles_keep_is_in_the_account_of_each(policy: Path):
    setup = built(policy, "--algorithm.beta", "0.1")
    roles = setup.roles
    assert roles.critic
    with_all = resident_bytes(roles.policy)
    assert resident_bytes(roles.critic) == with_all
    alone = built(policy, "--algorithm.beta", "0.1", "--algorithm.baseline", "none")
    state = resident_bytes(alone.roles.policy)
    # Parameters and two moments of the critic: of the policy's size, and a head of one output.
    assert 1.3 * state < with_all < 2 * state
    check_state(roles, 10 * with_all)
    with pytest.raises(UserError, match="the update of the critic needs more than"):
        check_state(roles, with_all)


def test_the_demonstrations_critic_begins_as_its_policy(tmp_path: Path):
    words = [*TINY, *PPO.split(), "--layout", "dp2tp1", "--profile", "none", "--run_dir", "unused"]
    setup = build(parse(words), jax.devices()[:2])
    roles = setup.roles
    assert roles.critic and not roles.models[CRITIC].role.source
    for role in roles.trained:
        role.programs.compile_all(threads=1, only=lambda key: key.name == "init_state")
    state = roles.policy["init_state"](roles.policy.trained.init(3))
    critic = initial_states(roles, state, 0)["critic"]
    before, after = (
        {jax.tree_util.keystr(at): x for at, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
        for tree in (state.params, critic.params)
    )
    assert {name for name in after if name not in before} == {"['score'].value"}
    for name, x in after.items():
        if name in before:
            np.testing.assert_array_equal(x, before[name])
        else:
            assert not np.any(x)
    # Copies: an update of the policy donates its buffers.
    assert not {id(x) for x in before.values()} & {id(x) for x in after.values()}
