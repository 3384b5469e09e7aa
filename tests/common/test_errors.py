"""Whatever of the input a sentence repeats, it is one line that a person can read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.errors import MOST_CHARACTERS, UserError
from pat_jax.common.rules import OptionError

PIECES = st.sampled_from(["word ", "\n", "x" * 299, "y" * 301, "z" * 100_000, "\r\n ", "é", "/a"])


@given(st.lists(PIECES, max_size=60).map("".join))
def test_a_sentence_is_one_line_of_bounded_length(repeated: str):
    sentence = str(UserError(f"option --data is {repeated}: expected a file; check it."))
    assert "\n" not in sentence and len(sentence) <= MOST_CHARACTERS
    assert sentence.startswith("option --data is ") and sentence.endswith("check it.")


def test_what_is_short_stays_as_it_is():
    sentence = f"file {'/tmp/folder' * 20}/a.json: broken; repair it."
    assert str(UserError(sentence)) == sentence


@pytest.mark.parametrize("value", ["x" * 100_000, ["x"] * 100_000, "a b " * 50_000, 10**4000])
def test_an_option_of_100_000_characters(value):
    sentence = str(OptionError("name", value, "less"))
    assert len(sentence) < 300 and sentence.endswith("expected less.")
