"""Text of others: equal to what Python's own reader gives, or one sentence."""

import copy
import json
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pat_jax.common.json_text import MAX_DEPTH, JsonError, parse_json

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
