"""Options with which nothing, or something else, would be learned in silence, and those that exclude each
other."""

import pytest

from pat_jax.common.errors import UserError
from pat_jax.common.rules import OptionError
from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.command_line import dump, parse
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.run import RunConfig


@pytest.mark.parametrize(
    ("option", "value"), [("num_generations", 1), ("temperature", 0.0), ("top_k", 1)]
)
def test_responses_that_cannot_differ_are_refused_where_something_is_trained(option, value):
    rollout = RolloutConfig(**{option: value})
    output = rf"--rollout\.{option} is .* (at least 2|above 0)"
    with pytest.raises(OptionError, match=output) as error:
        RunConfig(rollout=rollout)
    assert "an advantage compares the responses to one prompt." in str(error.value)
    assert RunConfig(rollout=rollout, train=False).sampling_note == ""
    RunConfig(rollout=rollout, steps=0)


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 50}])
def test_training_on_a_part_of_the_distribution_is_said(options):
    note = RunConfig(rollout=RolloutConfig(**options)).sampling_note
    assert "drawn from a part of the policy's distribution" in note and "\n" not in note


def parsed(tmp_path, *words: str, **files: str) -> AlgorithmConfig:
    for name, text in files.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        words = ("--config", str(path), *words)
    return parse(["--data", "x.jsonl", "--model", "m", *words]).algorithm


def test_a_name_sets_the_parts_of_its_algorithm_and_each_can_still_be_set(tmp_path):
    for name, parts in ALGORITHMS.items():
        teacher = ["--teacher.model", "t"] if parts["distill_coef"] else []
        algorithm = parsed(tmp_path, "--algorithm.name", name, *teacher)
        assert {part: getattr(algorithm, part) for part in parts} == dict(parts)
        assert algorithm.title == name
    words = ("--algorithm.epsilon_high", "0.3", "--algorithm.name", "dapo")
    assert parsed(tmp_path, *words) == parsed(tmp_path, *words[2:], *words[:2])
    assert parsed(tmp_path, *words).title == "dapo (epsilon_high 0.3)"
    assert AlgorithmConfig().title == "grpo"


def test_a_later_name_wins_over_parts_of_an_earlier_source(tmp_path):
    """A resumed run's file has every part written out."""
    file = dump(RunConfig(algorithm=AlgorithmConfig(name="dapo", **ALGORITHMS["dapo"])))
    (tmp_path / "written.yaml").write_text(file)
    words = ("--config", str(tmp_path / "written.yaml"))
    assert parse(words).algorithm.title == "dapo"
    assert parse([*words, "--algorithm.name", "gspo"]).algorithm.title == "gspo"
    changed = parse([*words, "--algorithm.delta", "0"]).algorithm
    assert changed.title == "dapo (delta 0.0)"
    mine = parsed(tmp_path, file="algorithm:\n  name: cispo\n  epsilon_high: 7\n")
    assert mine.title == "cispo (epsilon_high 7.0)"


def test_an_unknown_algorithm_is_told_the_nearest(tmp_path):
    with pytest.raises(OptionError, match=r"is 'dr-grpo': .* \(did you mean dr_grpo\?\)\.$"):
        parsed(tmp_path, "--algorithm.name", "dr-grpo")


SUM = "multi_objective_aggregation normalize_then_sum"


@pytest.mark.parametrize(
    ("options", "refused", "other"),
    [
        ("name=cispo delta=3", "delta", "surrogate cispo"),
        ("beta=0.1 kl_estimator=k1", "kl_estimator", "kl_in loss"),
        ("baseline=none scale_rewards=batch", "scale_rewards", "baseline none"),
        ("name=reinforce_pp dynamic_sampling=2", "dynamic_sampling", "baseline none"),
        ("name=gdpo baseline=leave_one_out", "baseline", SUM),
        ("name=gdpo scale_rewards=none", "scale_rewards", SUM),
        ("name=gdpo beta=0.1 kl_in=reward", "kl_in", SUM),
        ("name=gdpo overlong_buffer=0.2", "overlong_buffer", SUM),
    ],
)
def test_options_that_exclude_each_other_are_both_named(tmp_path, options, refused, other):
    with pytest.raises(OptionError, match=rf"--algorithm\.{refused} is .*--algorithm\.{other}"):
        parsed(tmp_path, *(f"--algorithm.{option}" for option in options.split()))


def test_one_response_is_enough_where_none_is_compared(tmp_path):
    words = ["--rollout.num_generations", "1", "--algorithm.name"]
    assert parsed(tmp_path, *words, "reinforce_pp").baseline == "none"
    with pytest.raises(OptionError, match="at least 2"):
        parsed(tmp_path, *words, "rloo")


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (["--lora.alpha", "16"], "--lora.alpha is 16.0"),
        (["--lora.export", "adapter"], "--lora.export is 'adapter'"),
        (["--lora.rank", "8", "--lora.export", "adapter"], "--checkpoint.export_dir"),
        (["--lora.rank", "8", "--train", "false", "--warm_start.steps", "0"], "--train false"),
        (["--lora.rank", "8", "--optimizer.weight_dtype", "bfloat16"], "float32 with --lora"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: list[str], output: str):
    with pytest.raises(UserError) as error:
        parse(options)
    assert output in str(error.value) and "\n" not in str(error.value)


def test_what_may_be_together():
    two = parse(["--lora.rank", "8", "--lora.targets", "q_proj", "v_proj"])
    assert two.lora.targets == ("q_proj", "v_proj")
    assert parse(["--lora.adapter", "somewhere", "--train", "false"]).lora.is_on
    assert not parse([]).lora.is_on
