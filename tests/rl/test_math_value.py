r"""Two answers have one value however they are written, and no other value passes for it.

The pairs of `math_pairs.txt` were written by hand from arithmetic, in every notation that responses
and reference answers use.
"""

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.rl.batches.types import FinishReason
from pat_jax.rl.data.problem_files import read_problem_file
from pat_jax.rl.rewards.built_in import math_reward
from pat_jax.rl.rewards.final_answer import final_answer
from pat_jax.rl.rewards.math_notation import plain
from pat_jax.rl.rewards.math_value import same_value

PAIRS = [
    re.split(" (====|=/=) ", line, maxsplit=1)
    for line in (Path(__file__).parent / "math_pairs.txt").read_text("utf-8").splitlines()[1:]
]
SMALL = st.integers(1, 999)


def test_pairs():
    wrong = [pair for pair in PAIRS if same_value(pair[0], pair[2]) is not (pair[1] == "====")]
    assert wrong == [] and len(PAIRS) > 600
    assert not same_value("", "0")


@given(SMALL, SMALL, st.integers(2, 40))
def test_mixed_numbers(whole, numerator, denominator):
    numerator = numerator % (denominator - 1) + 1
    value = whole + Fraction(numerator, denominator)
    for found in (
        f"{whole} {numerator}/{denominator}",
        rf"{whole}\frac{{{numerator}}}{{{denominator}}}",
    ):
        assert same_value(found, f"{value.numerator}/{value.denominator}")
        assert same_value(f"-{found}", f"-{value.numerator}/{value.denominator}")
        assert not same_value(found, f"{value.numerator + 1}/{value.denominator}")


@given(st.integers(0, 50), st.from_regex(r"[0-9]{0,3}", fullmatch=True), st.integers(1, 998))
def test_repeating_decimals(whole, first, again):
    digits = str(again)
    value = whole + Fraction(int(first or 0), 10 ** len(first))
    value += Fraction(again, (10 ** len(digits) - 1) * 10 ** len(first))
    assert same_value(
        rf"{whole}.{first}\overline{{{digits}}}", f"{value.numerator}/{value.denominator}"
    )


@given(SMALL, SMALL, st.integers(-60, -4), st.booleans())
def test_small_numbers_differ(one, other, exponent, is_power_of_ten):
    base = rf"10^{{{exponent}}}" if is_power_of_ten else rf"\frac{{1}}{{2^{{{-exponent}}}}}"
    assert same_value(rf"{one}\cdot {base}", rf"{other}\cdot {base}") == (one == other)


@given(st.permutations([3, 5, 7, 11]), st.sampled_from([r"\\", r" \\ ", r"\\ ", r" \\[2pt] "]))
def test_a_matrix_is_not_another_with_the_same_entries(entries, row):
    a, b, c, d = entries
    found = rf"\begin{{pmatrix}} {a} & {b}{row}{c} & {d} \end{{pmatrix}}"
    assert same_value(found, r"\begin{pmatrix}3&5\\7&11\end{pmatrix}") == (entries == [3, 5, 7, 11])
    column = rf"\begin{{pmatrix}}{a}{row}{b}{row}{c}\end{{pmatrix}}"
    assert not same_value(column, rf"\begin{{pmatrix}}{a} & {b} & {c}\end{{pmatrix}}")


@pytest.mark.parametrize("piece", ["1 ", "cm ", r"\frac{", "(", r"\\ ", "0.3", r"x \ne "])
def test_a_long_text_is_written_in_one_way_at_once(piece):
    assert len(plain(piece * 3000)) < 100_000  # `timeout` of pytest: quadratic would be minutes


def test_a_thought_that_the_template_opened_and_that_never_ends_has_no_answer():
    thought, ended = r"so \boxed{5}", r"so \boxed{4}, no.</think> \boxed{5}"

    def score(response: str, prompt: str = "q", **columns) -> list[float]:
        stop = [FinishReason.STOP]
        return math_reward([prompt], [response], answer=["5"], finish_reason=stop, **columns)

    assert score(thought) == score(ended, is_thinking=[True]) == [1]
    assert score(thought, is_thinking=[True]) == [0]
    assert score(thought, prompt="q<|assistant|>\n<think>\n") == [0]
    assert final_answer(thought, "a <think>") is None


@pytest.mark.parametrize(
    ("written", "expected"),
    [("1,234", "1234"), ("(1, 2)", "(1, 2)"), ("1, 234", "1, 234"), ("$1,250.50", "$1250.50")],
)
def test_gsm8k_loses_the_commas_between_groups_of_digits_alone(tmp_path, written, expected):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"question": "q", "answer": "so it is\\n#### {written}"}}\n')
    assert [row.columns["answer"] for row in read_problem_file(path).rows] == [expected]
