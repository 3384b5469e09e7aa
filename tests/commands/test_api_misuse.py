"""What Python's callers may give by mistake: one sentence, before any device is asked for."""

import re
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import pat_jax
from pat_jax import SavedRun, UserError
from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.text_session import TextSession
from pat_jax.rl.own_code import check_sent
from pat_jax.run.start.sent_code import REWARDS
from pat_jax.training.own_loss import LOSSES


def named(value: object) -> str:
    """The same in every process: an object's own words have its address."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))[:20]


WRONG: list[Any] = [3, True, b"x", object(), [[]], {"a": object()}, int]
NAMES = ["d/" * 3000, "a\0b", "\udcff", "", "/dev/full", "/proc/self/mem"]


def refused(call: Any) -> str:
    with pytest.raises(UserError) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 1300 and sentence.rstrip().endswith((".", "?"))
    return sentence


def test_an_integer_of_more_digits_than_python_writes():
    assert "thousands of digits" in refused(lambda: pat_jax.train(seed=10**5000))


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch):
    for name in ("train", "fine_tune", "plan", "generate", "evaluate", "doctor", "profile"):
        module = import_module(f"pat_jax.commands.{name}")
        monkeypatch.setattr(module, "configure", lambda *_: pytest.fail("it went on"))


@pytest.mark.parametrize("value", WRONG, ids=named)
def test_a_config_that_is_none(value):
    calls = pat_jax.train, pat_jax.sft, pat_jax.reward_model, pat_jax.evaluate, pat_jax.plan
    for call in (*calls, pat_jax.simulate, pat_jax.profile, pat_jax.doctor, pat_jax.session):
        refused(lambda call=call: call(value))
    refused(lambda: pat_jax.generate(["a"], value))


@pytest.mark.parametrize("value", WRONG, ids=named)
def test_options_that_are_none(value: Any):
    """The value of a section, of a number, and of an option that nobody has."""
    wrong: tuple[dict[str, Any], ...] = (
        {"rollout": value},
        {"no_such_option": value},
        {"rollout": {"top_p": [value, value]}},
    )
    for options in wrong:
        refused(lambda options=options: pat_jax.train(**options))
    refused(lambda: pat_jax.simulate(lengths=value, profile=value))


@pytest.mark.parametrize("value", [3, b"x", {}, [], [None], {"f": print}, object()])
def test_a_reward_that_is_none(value):
    assert "reward is " in refused(lambda: pat_jax.train("demo", reward=value))


class Splits(dict):
    """As `datasets.DatasetDict`."""

    column_names = MappingProxyType({"train": ["prompt"], "test": ["prompt"]})


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (3, "data is 3: expected names of files, or rows"),
        (b"x", "data is b'x': expected names of files, or rows"),
        (({"prompt": x} for x in "ab"), "put those of a generator into a list"),
        (list, "expected names of files, or rows"),
        (np.array(3), "expected names of files, or rows"),
        ([], "data is []: expected at least one row"),
        (range(3), "data=[...], row 1, is 0: expected a dictionary of columns"),
        ([{"prompt": "a"}, "b.jsonl"], "data=[...], row 2, is 'b.jsonl': expected a dictionary"),
        ([{"prompt": "a"}, {"prompt": float("nan")}], "row 2, column 'prompt', is nan: expected"),
        ([{"prompt": "a", "x": np.array([1, np.inf])}], "row 1, column 'x', is array([ 1., inf])"),
        ([{"prompt": "a", "x": b"a"}], "row 1, column 'x', is b'a': expected text"),
        ([{"prompt": "a", "image": object()}], "row 1, column 'image', is <object object"),
        ([{"prompt": "a", "x": {1: CIRCLE}}], "row 1, column 'x', is {1: [[...]]}"),
        ([{"prompt": "a", "x": 10**5000}], "row 1, column 'x', is an integer of thousands"),
        ([{3: "a"}], "row 1, column 3, is 'a': expected text"),
    ],
)
def test_rows_that_are_none(rows: Any, words: str, tmp_path: Path):
    run_dir = str(tmp_path / "run")
    assert words in refused(lambda: pat_jax.train(data=rows, run_dir=run_dir))
    told = refused(lambda: pat_jax.train({"data.files": rows}, run_dir=run_dir))
    assert words in told.replace("data.files", "data")
    assert list(tmp_path.iterdir()) == []
    if isinstance(rows, list) and not rows:
        return  # of sets to evaluate on there may be none
    told = refused(lambda: pat_jax.train("demo", eval={"data": rows}, run_dir=run_dir))
    assert words in told.replace("eval.data", "data") and "eval.data" in told
    assert list(tmp_path.iterdir()) == []


def test_splits_of_rows_are_not_rows():
    splits = Splits(train=[{"prompt": "a"}], test=[{"prompt": "a"}])
    output = refused(lambda: pat_jax.train(data=splits))
    assert "Splits of the splits train, test: expected one" in output


@pytest.mark.parametrize("value", [*WRONG, *NAMES], ids=named)
def test_a_run_that_is_none(value):
    refused(lambda: SavedRun(value))
    for call in (pat_jax.session, pat_jax.evaluate, partial(pat_jax.generate, ["a"])):
        refused(lambda call=call: call(run=value))


@pytest.mark.parametrize("name", NAMES, ids=named)
def test_a_path_that_is_none(name: str, monkeypatch):
    monkeypatch.setattr("pat_jax.commands.plan.configure", lambda *_: None)
    refused(lambda: pat_jax.train(name + ".yaml"))
    refused(lambda: pat_jax.simulate(profile=name))
    refused(lambda: pat_jax.plan(lengths=name or " ", model="tiny"))


@pytest.mark.parametrize(
    "prompts", [3, None, b"x", {1}, [3], [None], [["a"]], [{}], [{"x": 1}], [{3: 4}], [[{}]]]
)
def test_prompts_that_are_none(prompts):
    class Session:
        max_length = 64

    overrides = SamplingOverrides()
    session = TextSession(Session(), None, overrides, overrides, 0)  # pyright: ignore[reportArgumentType]
    refused(lambda: session.generate(prompts))


def test_pickled_code_that_came_with_a_run_is_not_opened(tmp_path: Path):
    for spec in ("math", f"{REWARDS}/0123.reward:f", "file.py:f", "http://a/b"):
        check_sent("reward", spec, REWARDS)
    check_sent("algorithm.loss", f"{LOSSES}/0123.loss:Mine", LOSSES)
    for option, folder in (("reward", REWARDS), ("algorithm.loss", LOSSES)):
        for other in (tmp_path, folder / "..", folder / "in"):
            for suffix in (".reward", ".loss"):
                spec = f"{other}/a{suffix}:f"
                assert "runs code" in refused(partial(check_sent, option, spec, folder))


def function(predicted, columns):
    return predicted


@pytest.mark.parametrize("value", [*WRONG, function, lambda x: x], ids=named)
def test_a_loss_that_is_none(value):
    assert "the method `values` of such a class" in refused(lambda: pat_jax.train(loss=value))
