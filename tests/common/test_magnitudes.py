"""Numbers that mean nothing are refused in one sentence, before anything is made of them."""

import math
from dataclasses import replace
from typing import Any

import pytest
from config_classes import CLASSES
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.common.errors import UserError
from pat_jax.common.options import names
from pat_jax.common.options.declared import Option, options_of
from pat_jax.common.rules import MOST_REPLAYED
from pat_jax.config import command_line as cli
from pat_jax.config.run import RunConfig
from pat_jax.config.sft import RewardModelConfig, SftConfig
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.simulate_config import SimulateConfig
from pat_jax.run.results.compare_config import CompareConfig


def refused(config_class: type, *argv: str) -> str:
    with pytest.raises(UserError) as caught:
        cli.parse(argv, config_class, presets=None)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and len(message) < 1000
    return message


def whole(option: Option) -> list[str]:
    return ["1e30", "1" + "0" * 400, "9" * 5000] if option.kind is int else ["1e30", "1e308"]


@pytest.mark.parametrize("config_class", CLASSES.values())
def test_every_number_has_bounds(config_class: type):
    for option in options_of(config_class()):
        if option.kind not in (int, float):
            continue
        least = "-9223372036854775807" if option.kind is int else "-1e30"
        for text in [*whole(option), "9" * 18, least]:
            assert f"--{option.name} is " in refused(config_class, f"--{option.name}={text}")


@pytest.mark.parametrize("config_class", [x for x in CLASSES.values() if x is not CompareConfig])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_text_for_a_number_is_a_value_or_one_sentence(config_class: type, data):
    kinds = (int, float)
    options = [option for option in options_of(config_class()) if option.kind in kinds]
    option = data.draw(st.sampled_from(options))
    number = st.integers().map(str) | st.floats().map(str)
    huge = st.integers(1, 6000).map(lambda digits: "7" * digits)
    text = data.draw(number | huge | st.text(max_size=9))
    try:
        config: Any = cli.parse([f"--{option.name}={text}"], config_class, presets=None)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return
    for name in option.name.split("."):
        config = getattr(config, name)
    assert isinstance(config, option.kind) and math.isfinite(config) and abs(config) < 2**63


@pytest.mark.parametrize("option", ["responses", "max_completion_length", "host_us"])
@given(numbers=st.lists(st.integers(1, MOST_REPLAYED) | st.integers(10**8, 10**5000), min_size=1))
@settings(max_examples=30, deadline=None)
def test_every_number_of_a_list_has_an_upper_bound(option: str, numbers: list[int]):
    try:
        text = ",".join(map(str, numbers))
    except ValueError:  # more digits than Python writes
        text = "9" * 5000
    if text != "9" * 5000 and max(numbers) <= MOST_REPLAYED:
        assert getattr(cli.parse([f"--{option}", text], SimulateConfig, presets=None), option)
    else:
        assert f"--{option} is " in refused(SimulateConfig, f"--{option}", text)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--rollout.temperature 1e-300", "expected 0 (greedy) or a number from 1e-06 to 1000"),
        ("--seed -1", "option --seed is -1: expected an integer from 0 to 4,294,967,295"),
        ("--devices 100000", "option --devices is 100000: expected an integer from 0 to 1,024"),
        ("--optimizer.learning_rate 5", "expected a number from 0 to 1."),
        (
            "--rollout.prompts_per_step 1048576 --algorithm.mini_batch_size 1048576",
            "at most 1,048,576 responses of all --rollout.prompts_per_step",
        ),
        ("--model x --steps 5 --optimizer.warmup_steps 6", "at most the 5 optimizer steps"),
    ],
)
def test_what_was_accepted_although_it_means_nothing(argv: str, expected: str):
    assert expected in refused(RunConfig, *argv.split())


@pytest.mark.parametrize(
    ("config_class", "argv", "expected"),
    [
        (PlanConfig, "--layers all --compile false", "--layers is 'all': expected few with"),
        (PlanConfig, "--profile x --sums one-shot", "--sums is 'one-shot': expected nccl with"),
    ],
)
def test_what_would_be_ignored_is_refused(config_class: type, argv: str, expected: str):
    assert expected in refused(config_class, *argv.split())


def test_a_warm_up_may_be_the_whole_run_and_says_nothing_where_nothing_is_trained():
    def config(*argv: str) -> RunConfig:
        return cli.parse(["--model", "x", "--optimizer.warmup_steps", "10", *argv])

    assert config("--steps", "10").optimizer.warmup_steps == 10
    assert config("--steps", "5", "--algorithm.num_iterations", "2").updates_per_step == 2
    assert replace(config("--train", "false", "--steps", "1"), steps=0).steps == 0


OPTIONS = {one: [option.name for option in options_of(one())] for one in CLASSES.values()}
# Things apart, though a neighbour has one word for both: a step or a call, the arithmetic of a run or of
# another model in it.
APART = ({"compute_dtype", "dtype"}, {"batch", "batch_size"})


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


@pytest.mark.parametrize(
    ("config_class", "theirs", "ours"),
    [
        (RunConfig, "max_tokens", "rollout.max_completion_length"),  # vLLM
        (RunConfig, "actor_rollout_ref.rollout.n", "rollout.num_generations"),
        (SftConfig, "num_train_epochs", "epochs"),  # TRL
        (RewardModelConfig, "train_batch_size", "batch_size"),
        (RunConfig, "critic.optim.lr", "critic.learning_rate"),  # verl
        (RunConfig, "trainer.critic_warmup", "critic.pretrain_steps"),
        (RunConfig, "max_steps", "steps"),
        (SimulateConfig, "sequences", "responses"),
        (RunConfig, "learning_rate", "optimizer.learning_rate"),  # TRL
        (RunConfig, "learning_rat", "optimizer.learning_rate"),
        (RunConfig, "critc.learning_rate", "critic.learning_rate"),
        (RunConfig, "data.val_files", "eval.data"),  # verl
        (SftConfig, "data.val_files", "eval.data"),
        (EvaluateConfig, "data.val_files", "data.files"),
    ],
)
def test_a_neighbours_word_is_answered_with_ours(config_class, theirs: str, ours: str):
    known = OPTIONS[config_class]
    assert ours in known and names.looked_up(theirs, known)[0] == ours
    assert f"did you mean --{ours}?" in str(names.unknown(theirs, known))


@pytest.mark.parametrize(
    "theirs", ["data.validation_set", "data.test_path", "val_fils", "data.eval"]
)
def test_what_is_held_out_is_never_answered_with_what_is_trained_on(theirs: str):
    known = [*OPTIONS[RunConfig], "data"]  # its short form
    near = names.looked_up(theirs, known)[0]
    assert near is None or near.startswith("eval.")


@pytest.mark.parametrize(
    ("theirs", "instead"),
    [
        ("vf_coef", "--critic.learning_rate"),
        ("algorithm.kl_ctrl.type", "--algorithm.kl_target"),
        ("reward_model_path", "--reward model:DIR"),  # TRL
        ("colocate_all_models", "--placement interleave or separate"),  # OpenRLHF
        ("async_train", "--placement.lag 1"),  # OpenRLHF
        ("async_training.staleness_threshold", "--placement.lag 1"),  # verl
        ("resource_pool", "--placement.critic"),  # verl
        ("remote_rm_url", "--reward http://"),
        ("total_episodes", "--steps"),
    ],
)
def test_what_no_option_means_is_answered_with_what_to_do(theirs: str, instead: str):
    known = [*OPTIONS[RunConfig], "placement"]  # its short form
    sentence = str(names.unknown(theirs, known))
    assert sentence.startswith(f"option --{theirs} is not offered: ")
    assert instead in sentence


@pytest.mark.parametrize("config_class", OPTIONS)
def test_every_word_of_a_line_leads_to_the_same_option(config_class):
    known = [name for name in OPTIONS[config_class] if name != "reward_model.max_length"]
    for word in {word for same in names._SAME for word in same} - set(map(leaf, known)):
        same = {each for line in names._SAME if word in line for each in line}
        ours = [name for name in known if name in same or leaf(name) in same]
        near, answer = names.looked_up(word, known)
        assert "." in word or not ours or near in ours or "--" in answer


def test_every_line_is_of_an_option_that_is_there():
    used = {word for known in OPTIONS.values() for name in known for word in (name, leaf(name))}
    assert [same[0] for same in names._SAME if not used & set(same)] == []


def test_one_word_for_one_thing_over_all_commands():
    used = {leaf(name) for known in OPTIONS.values() for name in known}
    twice = [words for same in names._SAME if len(words := used & set(same)) > 1]
    assert [words for words in twice if words not in APART] == []


@pytest.mark.parametrize("config_class", OPTIONS)
def test_how_others_sample_is_no_mistake_of_typing(config_class):
    known = OPTIONS[config_class]
    for name in [x for word in names._NOT_OFFERED for x in (word, f"rollout.{word}")]:
        word = leaf(name)
        same = {each for line in names._SAME if word in line for each in line}
        if name in known or word in map(leaf, known) or same & {*known, *map(leaf, known)}:
            continue  # it is there, by this name or by ours
        assert names.looked_up(name, known)[0] is None
        sentence = str(names.unknown(name, known))
        assert sentence == f"option --{name} is not offered here: leave it out (see --help)."


@pytest.mark.parametrize("word", ["temprature", "frequency"])
def test_a_mistake_of_typing_is_one(word: str):
    assert "not offered" not in str(names.unknown(word, OPTIONS[GenerateConfig]))
