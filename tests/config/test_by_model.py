"""What is open until the model is known: the lengths and the arithmetic that it brings, and who wins."""

from dataclasses import replace
from pathlib import Path

import pytest

from pat_jax.common.rules import OptionError
from pat_jax.config.by_model import KnownModel, settled, settled_examples
from pat_jax.config.command_line import dump, parse
from pat_jax.config.run import RunConfig
from pat_jax.config.sft import SftConfig
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.measure.config import ProfileConfig

CHECKPOINT = KnownModel("owner/model", is_checkpoint=True, context=8192, platform="cpu")
BUILT_IN = replace(CHECKPOINT, name="tiny", is_checkpoint=False)


def found(options: str, model: KnownModel, config_class: type[RunConfig] = RunConfig):
    config, note = settled(
        parse(["--model", model.name, "--data", "x", *options.split()], config_class), model
    )
    rollout = config.rollout
    return rollout.max_prompt_length, rollout.max_completion_length, config.compute_dtype, note


@pytest.mark.parametrize("config_class", [RunConfig, ProfileConfig])
def test_a_checkpoint_and_a_built_in_shape_have_other_defaults(config_class):
    assert found("", CHECKPOINT, config_class) == (512, 1024, "float32", "")
    assert found("", BUILT_IN, config_class) == (96, 160, "float32", "")
    accelerators = [replace(CHECKPOINT, platform=platform) for platform in ("gpu", "tpu")]
    for model in accelerators:
        assert found("", model, config_class) == (512, 1024, "bfloat16", "")
    assert found("", replace(BUILT_IN, platform="gpu"), config_class)[2] == "float32"


def test_what_is_written_wins(tmp_path: Path):
    gpu = replace(CHECKPOINT, platform="gpu")
    assert found("--preset qwen3-0.6b", CHECKPOINT) == (1024, 8192, "bfloat16", "")
    assert found("--preset smollm2-135m", gpu) == (512, 512, "float32", "")
    asked = "--rollout.max_prompt_length 96 --rollout.max_completion_length 160"
    assert found(f"{asked} --compute_dtype float32", gpu) == (96, 160, "float32", "")
    (tmp_path / "mine.yaml").write_text("rollout:\n  max_completion_length: 7\n")
    assert found(f"--config {tmp_path / 'mine.yaml'}", gpu) == (512, 7, "bfloat16", "")


def test_auto_takes_back_what_a_preset_says():
    options = "--preset qwen3-0.6b --compute_dtype auto --rollout.max_completion_length auto"
    assert found(options, CHECKPOINT) == (1024, 1024, "float32", "")
    with pytest.raises(OptionError, match=r"is 'auto': expected an integer\.$"):
        parse(["--rollout.min_rows", "auto"])
    with pytest.raises(OptionError, match=r"is 'automatic': expected an integer or auto\.$"):
        parse(["--rollout.max_prompt_length", "automatic"])
    with pytest.raises(OptionError, match="is 0: expected an integer from 1 to"):
        parse(["--rollout.max_completion_length", "0"])


@pytest.mark.parametrize(
    ("context", "options", "lengths", "words"),
    [
        (1536, "", (512, 1024), ""),
        (1500, "", (512, 988), "--rollout.max_completion_length is 988 in place of 1,024"),
        (600, "", (300, 300), "--rollout.max_prompt_length is 300 in place of 512, --rollout."),
        (600, "--rollout.max_completion_length 500", (100, 500), "max_prompt_length is 100 in"),
        (600, "--rollout.max_prompt_length 650", (650, 1), "max_completion_length is 1 in"),
    ],
)
def test_the_context_is_shared_and_the_response_gives_way_first(context, options, lengths, words):
    *shared, _, note = found(options, replace(CHECKPOINT, context=context))
    assert tuple(shared) == lengths and words in note and bool(words) == bool(note)
    assert not words or note.startswith(f"note: the context of 'owner/model' has {context:,} token")


def test_a_resumed_run_is_as_it_was(tmp_path: Path):
    """Its folder has what was settled, and what it is settled with now makes no difference."""
    config, _ = settled(parse(["--model", "owner/model", "--data", "x"]), CHECKPOINT)
    (tmp_path / "config.yaml").write_text(dump(config))
    again = parse(["--config", str(tmp_path / "config.yaml")])
    elsewhere = replace(CHECKPOINT, context=600, platform="gpu")
    assert settled(again, elsewhere) == (config, "") and again == config


def test_examples_are_as_long_as_the_context_allows():
    asked = SftConfig(model="m")
    for platform, dtype in (("cpu", "float32"), ("gpu", "bfloat16")):
        config, note = settled_examples(asked, 8192, platform)
        assert (config.max_length, config.compute_dtype, note) == (1024, dtype, "")
    config, note = settled_examples(asked, 600, "cpu")
    assert config.max_length == 600
    assert note == "note: the context of 'm' has 600 tokens: --max_length is 600 in place of 1,024"
    given = replace(asked, max_length=64, compute_dtype="float32")
    assert settled_examples(given, 32, "gpu") == (given, "")


def test_a_plan_has_no_longer_responses_than_the_model():
    asked = PlanConfig(model="m")
    assert asked.settled(131_072).max_completion_length == 24_576
    assert asked.settled(2048).max_completion_length == 1024
    assert replace(asked, max_completion_length=7).settled(2048).max_completion_length == 7
