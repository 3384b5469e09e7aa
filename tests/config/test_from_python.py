"""Options given in Python are those of the words that a shell would give, and are refused in the same ones."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.config.from_python import Config, words


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
        (None, {"stepz": 3}, "unknown option --stepz: did you mean --steps (see --help)?"),
        (None, {"rollout": {"topp": 1}}, "unknown option --rollout.topp: did you mean --rollout.top_p"),
        (None, {"steps": 2.5}, "option --steps is '2.5': expected an integer."),
        (None, {"steps": [1, 2]}, "unexpected '2': options are written --name value."),
        (None, {"model": object}, "option --model is <class 'object'>: expected a number, text,"),
        (None, {"reward": print}, "option --reward is <built-in function print>: expected a number"),
        (None, {"reward": ["a", "--b"]}, "option --reward is ['a', '--b']: expected texts that do not"),
        (None, {"model": {1: {2}}}, "option --model is {1: {2}}: expected a number, text,"),
        ("dem", {}, "config is 'dem': expected the name of a preset (demo, llama-3.1-8b,"),
        (3, {}, "config is 3: expected the name of a preset"),
        (None, {"help": True}, "unknown option --help: "),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_the_command_s_sentences(config, options, sentence: str):
    with pytest.raises(UserError) as caught:
        read(config, **options)
    assert str(caught.value).startswith(sentence)
