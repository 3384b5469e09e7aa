"""Text of others: equal to what Python's own reader gives, or one sentence."""

import copy
import io
import json
import logging
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pat_jax.common.errors import MOST_CHARACTERS, UserError, printable
from pat_jax.common.json_text import MAX_DEPTH, JsonError, of_json, parse_json
from pat_jax.common.rules import OptionError
from pat_jax.common.run_command import run_command
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from pat_jax.rl.data.arithmetic import CharTokenizer
from pat_jax.run.files.folder import log_to
from pat_jax.run.logging.completions import Completions
from pat_jax.run.logging.progress import Progress

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_a_value_comes_back(value):
    assert parse_json(json.dumps(value)) == value


@given(st.lists(st.sampled_from("[{"), max_size=2 * MAX_DEPTH))
@example(["["] * MAX_DEPTH)
@example(["{"] * (MAX_DEPTH + 1))
def test_up_to_the_limit_a_value_is_read_and_beyond_refused(brackets):
    opening = "".join(bracket + '"a":' * (bracket == "{") for bracket in brackets)
    closing = "".join("]}"[bracket == "{"] for bracket in reversed(brackets))
    text = f"{opening}1{closing}"
    if len(brackets) > MAX_DEPTH:
        with pytest.raises(JsonError, match="nested more than 100 deep"):
            parse_json(text)
    else:
        value = parse_json(text)
        assert value == json.loads(text)
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) and repr(value)


@pytest.mark.parametrize("bracket", ["[", '{"a":'])
def test_what_python_cannot_read_is_refused(bracket: str):
    with pytest.raises(JsonError, match="nested more than 100 deep"):
        parse_json(bracket * 200_000)


@given(st.text() | st.text('[]{}",:0123456789eE+-.\\u \n'))
def test_any_text_is_read_or_refused_with_its_place(text):
    try:
        expected = json.loads(text)
    except json.JSONDecodeError as error:
        with pytest.raises(JsonError, match="broken JSON") as caught:
            parse_json(text)
        assert caught.value.at() == f", line {error.lineno}, column {error.colno}"
        assert caught.value.at(line=7) == f", line 7, column {error.colno}"
    else:
        assert repr(parse_json(text)) == repr(expected)


def test_an_integer_that_python_does_not_read():
    assert parse_json("9" * 4300) == int("9" * 4300)
    with pytest.raises(JsonError, match="an integer of more than 4,300 digits") as caught:
        parse_json('{"answer": ' + "9" * 4301 + "}")
    assert caught.value.at() == "" and caught.value.at(line=2) == ", line 2"


HOSTILE = "\x1b]0;title\x07\x1b[31mred\x9b2J\r\x00\u202egnp.exe\ud800"
SHOWN = r"\x1b]0;title\x07\x1b[31mred\x9b2J\r\x00\u202egnp.exe\ud800"


@given(st.text(st.characters(exclude_categories=[])))
def test_no_control_character_is_left_and_the_rest_is_as_it_was(text):
    shown = printable(text)
    shown.encode()
    steering = {c for c in text if c not in "\n\t" and (c < " " or "\x7f" <= c <= "\x9f")}
    assert not steering & set(shown)
    if text.isprintable():
        assert shown == text
    assert printable(shown) == shown


def test_what_languages_need_is_left():
    text = "naïve – 日本語\t\u0645\u06cc\u200c\u062e\n👩\u200d🔬 \u00a0"
    assert printable(text) == text
    assert printable(HOSTILE) == SHOWN


def test_progress_shows_it():
    stream = io.StringIO()
    Progress(3, stream=stream).print(HOSTILE)
    assert stream.getvalue() == f"{SHOWN}\n"


def test_an_error_shows_it(capsys):
    def main() -> None:
        raise UserError(HOSTILE)

    with pytest.raises(SystemExit):
        run_command(main)
    assert capsys.readouterr().err == f"error: {SHOWN}\n"
    assert UserError(HOSTILE)._render_traceback_() == [f"error: {SHOWN}"]


def test_the_log_of_a_run_shows_it(tmp_path, monkeypatch):
    package = logging.getLogger("pat_jax")
    monkeypatch.setattr(package, "handlers", [])
    monkeypatch.setattr(package, "propagate", True)
    monkeypatch.setattr(package, "level", package.level)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    log_to(tmp_path / "run.log")
    logging.getLogger("pat_jax.of_a_test").warning("said %s", HOSTILE)
    package.handlers[0].close()
    assert (tmp_path / "run.log").read_text().endswith(f"said {SHOWN}\n")


class Point(NamedTuple):
    x: int
    y: float = 0.0


@dataclass(frozen=True)
class Kept:
    name: Literal["a", "b"]
    points: tuple[Point, ...]
    pair: tuple[int, str]
    limit: int = None  # pyright: ignore[reportAssignmentType]  # as an option that is auto
    score: float | None = 1.0
    rows: list[dict[str, str]] = field(default_factory=list)


KEPT = Kept("a", (Point(1, 2.5),), (3, "c"), None, None, [{"role": "user"}])  # pyright: ignore


def test_a_dataclass_comes_back_from_json():
    content = asdict(KEPT) | {"points": [{"x": 1, "y": 2.5}]}
    assert of_json(Kept, json.loads(json.dumps(content))) == KEPT
    assert of_json(Kept, content) == KEPT


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "c"},
        {"points": [{"x": 1.5}]},
        {"points": [{"y": 1.0}]},
        {"points": "ab"},
        {"points": None},
        {"pair": [3]},
        {"pair": ["c", 3]},
        {"pair": [True, "c"]},
        {"pair": [2**63, "c"]},
        {"limit": "3"},
        {"score": "1"},
        {"score": []},
        {"rows": [{"role": 1}]},
        {"rows": {"role": "user"}},
        {"other": 1},
    ],
)
def test_a_field_of_another_type_is_refused(wrong: dict[str, object]):
    content = asdict(KEPT) | {"points": [{"x": 1, "y": 2.5}]} | wrong
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        of_json(Kept, content)


class Hostile(CharTokenizer):
    def decode(self, tokens: Sequence[int]) -> str:
        del tokens
        return HOSTILE


def test_samples_show_it(tmp_path):
    kept = Completions(Hostile("a"), tmp_path, is_asked=False)
    prompt = Prompt(0, (1,), HOSTILE, {})
    tokens, logprobs = np.array([1], np.int32), np.zeros(1, np.float32)
    rollout = Rollout(prompt, 0, tokens, logprobs, FinishReason.STOP)
    lines = [*kept.samples([rollout], np.ones(1, np.float32), 1)]
    assert printable("".join(lines)) == "".join(lines) and SHOWN.replace(r"\r", " ") in lines[1]


PIECES = st.sampled_from(["word ", "\n", "x" * 299, "y" * 301, "z" * 100_000, "\r\n ", "é", "/a"])


@given(st.lists(PIECES, max_size=60).map("".join))
def test_a_sentence_is_one_line_of_bounded_length(repeated: str):
    sentence = str(UserError(f"option --data is {repeated}: expected a file; check it."))
    assert "\n" not in sentence and len(sentence) <= MOST_CHARACTERS
    assert sentence.startswith("option --data is ") and sentence.endswith("check it.")


@pytest.mark.parametrize("value", ["x" * 100_000, ["x"] * 100_000, "a b " * 50_000, 10**4000])
def test_an_option_of_100_000_characters(value):
    sentence = str(OptionError("name", value, "less"))
    assert len(sentence) < 300 and sentence.endswith("expected less.")
