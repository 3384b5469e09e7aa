"""A user who changes one option need not change a second."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from pat_jax.common.options.declared import Option, options_of
from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import parse
from pat_jax.evaluation.config import EvaluateConfig

BASES = {
    "demo": "",
    "a model and data": "--model owner/name --data lessons.jsonl",
    "ppo": "--preset ppo",
    "a preset with data": "--preset qwen2.5-0.5b",
}
# What is asked for cannot be had without a second option, which has no default that would suit.
ASKS_FOR = {
    ("resume", "run_dir"),
    ("algorithm.name", "teacher.model"),
    ("algorithm.distill_coef", "teacher.model"),
    ("placement.name", "algorithm.name"),  # split is for critics
    ("algorithm.multi_objective_aggregation", "algorithm.baseline"),  # with a critic
}
NUMBERS = [0, 1, 2, 3, 5, 8, 24, 100, 1000]


def values(option: Option) -> Iterator[str]:
    """Yields values of the option's kind, of which its own rule may refuse some."""
    kind = get_args(option.kind)[0] if option.takes_many else option.kind
    if kind is bool or get_origin(kind) is Literal:
        yield from ("true", "false") if kind is bool else get_args(kind)
    elif kind is str:
        yield from ("a.jsonl", "all", "dp2tp1", "suffix", "wandb")
    else:
        yield from (str(kind(number / 4 if kind is float else number)) for number in NUMBERS)


def blamed(words: list[str]) -> str | None:
    """Returns the option that is refused, or None."""
    try:
        parse(words)
    except OptionError as error:
        return error.name
    return None


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_no_other_option_is_refused(base: str):
    tried = 0
    for option in options_of(parse(base.split())):
        for value in values(option):
            name = blamed([*base.split(), f"--{option.short or option.name}={value}"])
            assert name in (None, option.name) or (option.name, name) in ASKS_FOR, (value, name)
            tried += name is None
    assert tried > 400


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--rollout.prompts_per_step 4", {"mini_batch_size": 4, "updates_per_step": 1}),
        ("--preset ppo", {"mini_batch_size": 64, "updates_per_step": 2}),
        ("--preset ppo --rollout.prompts_per_step 24", {"mini_batch_size": 24}),
        (
            "--preset ppo --algorithm grpo",
            {"critic.learning_rate": None, "algorithm.baseline": "group"},
        ),
        ("--preset qwen2.5-0.5b --steps 3", {"steps": 3, "optimizer.warmup_steps": 0}),
        ("--rollout.page_size 32", {"rollout.min_length": 64}),
        ("--rollout.check_every 24", {"rollout.burst_steps": 72}),
        ("--algorithm.baseline none", {"algorithm.scale_rewards": "none"}),
        ("--algorithm.whiten_advantages", {"algorithm.scale_rewards": "none"}),
        ("--algorithm.surrogate cispo", {"algorithm.delta": 0.0}),
        ("--algorithm.surrogate cispo --algorithm grpo", {"algorithm.delta": 0.0}),
        (
            "--placement separate --placement.lag 1",
            {"algorithm.rollout_correction": "token_truncate"},
        ),
    ],
)
def test_others_follow(words: str, expected: dict[str, Any]):
    config = parse(words.split())
    for name, value in expected.items():
        found = config
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name


def test_what_belongs_to_the_data_of_a_preset_goes_with_them():
    preset = parse(["--preset", "qwen2.5-0.5b"])
    assert preset.data.system_prompt and preset.eval.data
    own = parse(["--preset", "qwen2.5-0.5b", "--data", "mine.jsonl"])
    assert own.data.files == ("mine.jsonl",) and own.data.system_prompt == ""
    assert own.eval.data == () and own.rollout == preset.rollout
    prompted = parse(
        ["--preset", "qwen2.5-0.5b", "--data", "mine.jsonl", "--data.system_prompt", "Sum."]
    )
    assert prompted.data.system_prompt == "Sum."
    assert parse(["--preset", "demo", "--data", "mine.jsonl"]).warm_start.steps == 0
    assert parse(["--preset", "qwen2.5-0.5b", "--data", *preset.data.files]) == preset
    assert parse(["--preset", "demo", "--data", "arithmetic"]) == parse(["--preset", "demo"])


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("", []),
        ("--preset demo --data arithmetic", []),
        ("--preset demo --data mine.jsonl", ["demo", "warm_start.steps"]),
        ("--preset demo --data mine.jsonl --warm_start.steps 0", []),
        ("--preset ppo --rollout.prompts_per_step 100", ["ppo", "algorithm.mini_batch_size"]),
        ("--preset qwen2.5-0.5b --steps 3", ["qwen2.5-0.5b", "optimizer.warmup_steps"]),
        ("--preset qwen2.5-0.5b --steps 3 --optimizer.warmup_steps 1", []),
    ],
)
def test_a_note_names_what_a_preset_loses(words: str, left: list[str], capsys):
    parse(words.split())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(left)
    assert not left or (lines[0].startswith("note: ") and all(name in lines[0] for name in left))


def test_what_only_a_user_can_give_is_asked_for():
    with pytest.raises(OptionError, match=r"option --model is '' in preset qwen3-8b, line 2"):
        parse(["--preset", "qwen3-8b"])
    with pytest.raises(OptionError, match=r"mini_batch_size is 3: expected a divisor"):
        parse(["--preset", "ppo", "--algorithm.mini_batch_size", "3"])
    with pytest.raises(OptionError, match=r"option --train is False in preset switching, line"):
        parse(["--preset", "switching", "--placement", "split", "--algorithm.name", "ppo"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--placement.critic 0",
            "placement.critic is '0': expected nothing in a run without a critic",
        ),
        ("--placement.reference 0", "placement.reference is '0': expected nothing"),
        ("--placement.teacher 0", "placement.teacher is '0': expected nothing"),
        (
            "--placement.reward 0",
            "placement.reward is '0': expected nothing in a run without a reward",
        ),
        ("--reward_model.max_length 64", "expected auto without a reward model .*; leave it out"),
        ("--critic.learning_rate 1e-3", "expected nothing with --algorithm.baseline group"),
    ],
)
def test_an_option_of_a_model_that_is_not_there_is_refused(words: str, expected: str):
    with pytest.raises(OptionError, match=expected):
        parse(words.split())


@pytest.mark.parametrize("words", ["--max_length 5", "--tokens_per_micro_batch 64"])
def test_an_evaluation_without_a_reward_model_has_no_options_of_one(words: str):
    base = ["--model", "m", "--data", "d", *f"--reward_model.{words[2:]}".split()]
    with pytest.raises(OptionError, match="without a reward model in --reward"):
        parse(base, EvaluateConfig, presets=None)
    for judged in (["--reward", "exact", "model:judge"], ["--reward_model", "judge"]):
        found = parse([*base[4:], *judged], EvaluateConfig, presets=None)
        assert found.reward_model != EvaluateConfig().reward_model


def test_an_option_of_a_model_that_is_there_is_taken():
    given = "--preset ppo --algorithm.beta 0.1 --reward model:judge --reward_model.max_length 64"
    places = "--placement.critic 0 --placement.reference 0 --placement.reward 1"
    assert parse(f"{given} {places}".split()).placement.reward == "1"
