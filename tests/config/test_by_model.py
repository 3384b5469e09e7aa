"""What is open until the model is known: the lengths and the arithmetic that it brings, and who wins."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.common.errors import UserError
from pat_jax.common.rules import OptionError
from pat_jax.config.by_model import KnownModel, settled, settled_examples
from pat_jax.config.command_line import dump, parse
from pat_jax.config.from_python import Config, words
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
    for prompts in (48, 64):  # still one optimizer step
        words = ["--config", str(tmp_path / "config.yaml"), "--rollout.prompts_per_step"]
        assert parse([*words, str(prompts)]).updates_per_step == 1


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
    for context, lengths in ((131_072, (1024, 24_576)), (4096, (1024, 3072)), (600, (300, 300))):
        rollout = asked.settled(context)[0].rollout
        assert (rollout.max_prompt_length, rollout.max_completion_length) == lengths
    short = replace(asked, rollout=replace(asked.rollout, max_completion_length=7))
    assert short.settled(2048)[0].rollout.max_completion_length == 7


def read(config: Config = None, **options):
    return parse(words(config, options))


def test_names_values_and_sections_are_those_of_the_command():
    found = read(
        "demo",
        steps=np.int64(7),
        train=False,
        reward=["exact", "math"],
        reward_weights=(1, np.float32(0.5)),
        run_dir=Path("runs") / "one",
        rollout={"top_p": 0.9, "compile": "all"},
        data="arithmetic",
        profile=None,
    )
    asked = "--preset demo --steps 7 --train false --reward exact math --reward_weights 1 0.5"
    asked += " --run_dir runs/one --rollout.top_p 0.9 --rollout.compile all --data arithmetic"
    assert found == parse(asked.split())
    assert found == read({"preset": "demo"} | dict(OPTIONS.items()))


OPTIONS = {
    "steps": 7,
    "train": False,
    "reward": ["exact", "math"],
    "reward_weights": [1, 0.5],
    "run_dir": "runs/one",
    "rollout.top_p": 0.9,
    "rollout": {"compile": "all"},
    "data": {"files": ["arithmetic"]},
}


def test_options_win_over_files_and_dictionaries(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3\nseed: 5\nmodel: tiny\n")
    assert (read(path).steps, read(str(path), steps=4).steps) == (3, 4)
    assert (read(path, steps=4).seed, read({"steps": 3, "seed": 5}, steps=4).seed) == (5, 5)
    assert read({"steps": 3}, steps=4).steps == 4


def test_an_empty_list_is_none_of_many(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("eval:\n  data: [a.jsonl]\nreward_weights: [1]\n")
    for words_of in ({"eval": {"data": []}}, {"eval.data": ()}):
        found = read(path, reward_weights=[], **words_of)
        assert (found.eval.data, found.reward_weights) == ((), ())
    with pytest.raises(UserError, match=r"option --data.files is '': expected"):
        read(data=[])
    assert parse(["--eval.data=[]"]) == parse([])


def test_an_object_is_written_as_one():
    variables = {"enable_thinking": False, "name": "ä"}
    found = parse(
        words({"chat_template_kwargs": variables}, {}, GenerateConfig, None),
        GenerateConfig,
        presets=None,
    )
    assert found.chat.variables == variables


@given(st.floats(1e-6, 1e3), st.floats(0, 1))
def test_numbers_arrive_to_the_last_bit(temperature: float, rate: float):
    found = read(rollout={"temperature": temperature}, optimizer={"learning_rate": rate})
    assert math.isclose(found.rollout.temperature, temperature, rel_tol=0)
    assert found.optimizer.learning_rate == rate


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        (None, {"stepz": 3}, "unknown option stepz=3: did you mean steps=3?"),
        (None, {"rollout": {"topp": 1}}, "unknown option rollout={'topp': 1}: did you mean rollout={'top_p'"),
        (None, {"steps": 2.5}, "option --steps is '2.5': expected an integer."),
        (None, {"steps": [1, 2]}, "option --steps is [1, 2]: expected an integer."),
        (None, {"model": object}, "option --model is <class 'object'>: expected a number, text,"),
        (None, {"reward": print}, "option --reward is <built-in function print>: expected a number"),
        (None, {"reward": ["a", "--b"]}, "option --reward is ['a', '--b']: expected texts that do not"),
        (None, {"model": {1: {2}}}, "option --model is {1: {2}}: expected a number, text,"),
        ("dem", {}, "config is 'dem': expected the name of a preset (demo, llama-3.1-8b,"),
        (3, {}, "config is 3: expected the name of a preset"),
        (None, {"help": True}, "unknown option help=True: "),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_sentence(config, options, sentence: str):
    with pytest.raises(UserError) as caught:
        read(config, **options)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("platform", "asked", "chosen"),
    [("cpu", "auto", "none"), ("cpu", "full", "full"), ("gpu", "auto", "auto")],
)
def test_only_a_cpu_needs_no_account_of_memory_to_choose_what_is_kept(platform, asked, chosen):
    run, _ = settled(RunConfig(remat=asked), KnownModel("m", True, 4096, platform))
    examples, _ = settled_examples(SftConfig(model="m", remat=asked), 4096, platform)
    assert run.remat == examples.remat == chosen
