r"""The math reward: final answers are found however they are written, and nothing else earns."""

import json
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_writing import rows_of

from pat_jax.rl.batches.types import FinishReason
from pat_jax.rl.data.schemas import INSTRUCTION, ProblemSchema
from pat_jax.rl.rewards.built_in import math_lenient_reward, math_reward
from pat_jax.rl.rewards.math_value import same_value
from pat_jax.rl.text.final_answer import final_answer, last_box
from pat_jax.rl.text.math_notation import plain

DATA = Path(__file__).parents[3] / "shared" / "data" / "math"
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"the DeepScaleR and GSM8K samples are not at {DATA}"
)


def several(block: str) -> list[str]:
    """Cases that stand in one block of text, in which ⏎ is the end of a line."""
    cases = (case for line in block.strip().splitlines() for case in line.split("|"))
    return [case.strip().replace("⏎", "\n") for case in cases]


# One of each kind of answer in MATH.
GOLDS = r"""
5 | -12 | 0 | 2220 | 1234567 | 8.75 | .3 | \frac{1}{2} | -\frac{5}{2} | \frac14 | -\dfrac{11}{12} | 2/15
10\frac{1}{12} | \frac{2\sqrt{35}}{35} | \sqrt{2}+1 | 3\sqrt{2} | \frac{25\pi}{2} | 5^{12} | 12^{1/7}
(3, -1) | [0,3) | (0,1] | (-\infty,-2)\cup(2,\infty) | [1,\infty) | -2, 2 | 2-2p | x^2 + 7x + 10
(t-7)(t+7) | 42x\sqrt{5x} | 2001+25i | -i | x = 12 | y=-2x+1 | \$42409 | 20\text{ days} | 17\%
\text{Friday} | B | \left(-\frac{1}{2}, 3, -\frac{5}{2}\right) | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
"""
FORMS = [  # of a final answer; `@` is the answer
    *(r"so \boxed{@}.", r"so \boxed {@}.", r"so \boxed{ @ }", r"so \boxed{@.}", r"so \boxed{$@$}"),
    *(r"so \boxed{\(@\)}", r"so \boxed{\displaystyle @}", r"so \boxed{\boxed{@}}"),
    *(r"so **\boxed{@}**", r"so $\boxed{@}$.", r"so $$\boxed{@}$$", r"so \(\boxed{@}\)."),
    *("so\n\\[\n\\boxed{@}\n\\]\n", "so \\boxed{@}\n\nThis is it, and not 3."),
    *("so \\boxed{@}\n\n$\\boxed{@}$", r"so \fbox{@}", r"so \fbox{$@$}", r"so \framebox{@}"),
    "<think>\\boxed{77} or so</think> so <answer>@</answer>",
    *("so <answer> $@$ </answer>", "so <answer>\n@.\n</answer>", r"so <answer>\boxed{@}</answer>"),
    *("so\nAnswer: @", "so\nAnswer: $@$.", "so\nanswer: \\(@\\)", "so\n**Answer:** $@$"),
    *("so\n**Answer**: @", "so\n**Final Answer: @**", "so\nFinal answer: @", "so the answer is @."),
    "so\nFinal Answer: The final answer is $@$. I hope it is correct.",
    *("so\n**Final Answer**:\n\n$@$", "so\n### Final Answer\n\n$\\boxed{@}$"),
    *("so\n#### @", "so\n#### $@$\n", "so\n$@$", "so\n$$@$$.", "so\n\\[\n@\n\\]"),
]
# Words for an answer, as headings and in other languages.
WORDS = r"""
### Answer⏎34 | ## Final Answer⏎⏎$34$ | #### Answer⏎34 | **Answer**⏎34 | Answer⏎34
#### Step 3: the sum⏎⏎Answer: 34 | ### Answer⏎There are 34 apples. | ### Answer⏎3 + 31 = 34
## 最终答案⏎⏎34 | ### Final Answer⏎⏎\[⏎34⏎\] | ### Answer⏎$$⏎34⏎$$ | ## Answer⏎\[⏎34⏎\]⏎as shown.
### Answer⏎- 34 | ### Answer⏎> 34 | ### Answer⏎```⏎34⏎``` | ### Your Answer⏎**34** | 答案：34
答案是 34。 | 因此，答案为34。 | **答案**：34 | 答: 34 | 答案：３４ | \boxed{答案：34} | 答案：34个 | 答え：34円 | 答案：34元
정답: 34개 | 答案是34，因为 3+31。 | 故答案为：34 | 答えは34です。 | 答え: 34 | 정답은 34입니다. | 답: 34
La respuesta es 34. | La respuesta final es 34. | Réponse : 34 | Die Antwort ist 34 €.
Die Antwort lautet 34. | ## Antwort⏎34 | Ответ: 34. | A resposta é 34 | Risposta: 34 | Cevap: 34
Đáp số: 34 | الجواب: 34 | उत्तर: 34 | \boxed{\text{The answer is } 34}
The answer to how many apples are left is 34. | The answer to part 2 of the problem: 34
The answer to 3 + 31 is 34. | The answer to the inequality x > 3 is 34
The answer (not including tax) is 34 | The answer, not rounded, is 34
The answer is 34.⏎Please check my answer | Answer: 34⏎That is the answer
The answer is 34.⏎⏎Verify the answer⏎We plug in
The answer is 34.⏎### Checking the Answer⏎Plug in 34: works.
Answer: 34⏎⏎## Explanation of Answer⏎Because 3 + 31 is it
"""
# They say another answer, two, or none.
OTHERS = r"""
### Answer⏎35 | ### Answer⏎34 or 35 | ### Answer⏎Not 34 | ### Answer⏎-34 | **Answer**⏎Wrong: 34
#### Answer⏎35⏎34 | My answer⏎is the following:⏎34 | Answer: 34 to 36 | 答案：34或35 | 答案不是34
答案：34 是错的 | 答えは34ではない | 答えは34ですか | 정답은 34가 아닙니다 | La respuesta no es 34
La respuesta es 34 o 35 | Die Antwort ist nicht 34 | Die Antwort ist 34 oder 35
Antwort: 34 ist falsch | La réponse n'est pas 34 | Ответ: не 34
"""
OPEN = [  # they say two numbers, or another
    *(r"\boxed{5} or \boxed{6}", r"$\boxed{6}$, $\boxed{5}$.", "\\boxed{5}\n\\boxed{6}"),
    *("Answer: 5 or 6", "Answer: between 6 and 5", "Answer: 5 to 6", "Answer: -(5)", "Answer: ±5"),
    *("The answer is $5$ or $6$.", "<answer>6 or 5</answer>", "<answer>5\n6</answer>"),
    "#### 5 or 6",
    *(r"Answer: \pm 5", "Answer: +/-5", r"Answer: 5 \pm 1"),
]


def score(response: str, answer: object, finish: FinishReason = STOP, prompt: str = "p") -> float:
    [earned] = math_reward([prompt], [response], answer=[answer], finish_reason=[finish])
    return earned


def deepscaler() -> list[dict[str, str]]:
    rows = json.loads((DATA / "deepscaler" / "math_train_first1000.json").read_text())
    return [row for row in rows if row["answer"] is not None]


def gsm8k() -> list[tuple[str, str, str]]:
    with (DATA / "gsm8k" / "train_first1000.jsonl").open() as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["question"], row["answer"], row["answer"].rpartition("#### ")[2]) for row in rows]


# --- how answers are written -------------------------------------------------------------------


def forms(gold: str) -> list[str]:
    return [form.replace("@", gold) for form in FORMS]


def test_every_way_to_give_an_answer_is_recognised():
    cases = [(text, gold) for gold in several(GOLDS) for text in forms(gold)]
    assert [case for case in cases if not score(*case)] == []
    assert score("Answer: 5 clips", "5") == 1
    assert [text for text in OPEN if score(text, "5")] == []


def test_words_for_an_answer_in_many_languages_and_as_headings():
    assert [text for text in several(WORDS) if not score(text, "34")] == []
    assert [text for text in several(OTHERS) if score(text, "34")] == []


@needs_data
def test_real_answers_are_recognised_however_they_are_given():
    golds = list(dict.fromkeys(row["answer"] for row in deepscaler()))[::20]
    cases = [(text, gold) for gold in golds for text in forms(gold)]
    missed = [case for case in cases if not score(*case)]
    print(f"{1 - len(missed) / len(cases):.2%} of {len(cases)}")
    assert len(missed) <= len(cases) / 100, missed


# --- which part of a response is its answer ----------------------------------------------------


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"\boxed{4} no, \boxed{5}", "5"),
        (r"\boxed{5} and \boxed{4", "5"),  # an unfinished box is none
        (r"\boxed{4} and \boxed{5}", "4, 5"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
        (r"\boxed 5.", "5"),
        (r"\boxed{}", None),
        (r"$\boxed{5}$, unlike Answer: 7", "5"),
        ("<think>\\boxed{4}</think> Answer: 5", "5"),
        ("<think>\\boxed{4}", None),
        ("<answer>4</answer> no, <answer>5</answer>", "5"),
        ("#### 4\n#### 5\nright", "5"),
        ("Answer: 4\nAnswer: 5", "5"),
        ("The answer is 5. It was not 4.", "5"),
        ("<answer>The answer is 5</answer>", "5"),
        ("so\n$\\$5$", r"\$5"),
        ("so $5$", None),
        ("72 clips", None),
        ("", None),
    ],
)
def test_final_answer(response, expected):
    assert final_answer(response) == expected


@pytest.mark.parametrize("finish", [STOP, LENGTH])
def test_only_a_response_that_ended_earns(finish):
    assert score(r"\boxed{5}", "5", finish) == (finish is STOP)


@given(st.text(st.sampled_from(r"\boxed{}-+.,/0123456789 ax")), st.integers(-999, 999))
def test_a_number_without_a_form_earns_nothing_unless_lenient(text, value):
    text = text.replace("}", "").replace(r"\boxed", "")
    response = f"{text} is {value}"
    assert score(response, str(value)) == 0
    assert math_lenient_reward(["p"], [response], answer=[str(value)]) == [1.0]


PIECES = st.sampled_from(
    [
        *(r"\boxed{", r"\fbox", "{", "}", "(", ")", "[", "]", "$", "$$", r"\(", r"\)", r"\text{"),
        *(r"\frac", "1", "12", ".", ",", "=", "==", "x", "x=", "<", "or", r"\pm", "+", "-"),
        *("/", "^"),
        *("_", "%", "∞", "√", "|", "&", r"\\", "!", r"\le", r"\approx", "é", r"\cup", r"\sqrt"),
        *("Answer:", "####", "<answer>", "</answer>", r"\begin{pmatrix}", r"\end{pmatrix}"),
    ]
)


@given(st.lists(PIECES, max_size=25).map("".join), st.lists(PIECES, max_size=5).map("".join))
def test_no_text_raises(response, answer):
    """It would have no reward, and so no share in what is learned."""
    assert score(response, answer) in (0, 1)


UNCLOSED = [
    *(r"\boxed{", "<answer>", "</answer>", "<think>", "</think>", "####", "Answer:", "answer "),
    *("$", "$$", r"\(", r"\[", "\n$", "{", "}", r"\boxed{1}", r"\boxed{1} and ", r"\text{", " "),
]


def test_a_text_is_read_once():
    """Of 5,400 unclosed boxes, each was once read to the end: 40 s."""
    for piece in UNCLOSED:
        for text in (piece * 5400, piece * 5400 + r"\]", piece * 5400 + "$"):
            start = time.process_time()
            final_answer(text)
            last_box(text)
            assert time.process_time() - start < 1, piece


# --- what must not earn ------------------------------------------------------------------------


@needs_data
def test_real_answers_earn_and_the_next_rows_do_not():
    answers = [row["answer"] for row in deepscaler()[:100]]
    boxed = [rf"It follows that \boxed{{{answer}}}." for answer in answers]
    assert all(map(score, boxed, answers))
    assert sum(map(score, boxed, answers[1:] + answers[:1])) < 10
    assert all(score(solution, answer) for _, solution, answer in gsm8k())


@needs_data
@pytest.mark.parametrize("share", [0.75, 0.9, 0.97])
def test_solutions_that_are_cut_earn_nothing(share):
    """Under `math_lenient` 11, 46 and 90 % of them earn by their last number."""
    cut = [(text[: int(len(text) * share)], answer) for _, text, answer in gsm8k()]
    assert sum(score(text, answer, LENGTH) for text, answer in cut) == 0
    # Had they ended there: one says "the answer as a percentage: 50 / 200 * 100% = 25".
    assert sum(score(text, answer) for text, answer in cut) <= 1


@needs_data
def test_a_copy_of_the_question_earns_nothing():
    problems = [(row["problem"], row["answer"]) for row in deepscaler()]
    problems += [(question, answer) for question, _, answer in gsm8k()]
    for question, answer in problems:
        prompt = f"{question} {INSTRUCTION}"
        assert score(question, answer, prompt=prompt) == 0, question
        assert score(prompt, answer, prompt=prompt) == 0, question


def test_a_copy_earns_nothing_and_an_answer_that_an_example_had_as_well_does():
    prompt = "Compute the following, please, as well as you can:\n\n$2+2$"
    assert score(prompt, "4", prompt=prompt) == score("$2+2$", "4", prompt=prompt) == 0
    assert score("$4$", "4", prompt=prompt) == 1
    assert score("The answer is 5.", "5", prompt="3+2? The answer is 5. 1+4?") == 1


# --- values -----------------------------------------------------------------------------------------

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
    assert [row.columns["answer"] for row in rows_of(path, ProblemSchema())] == [expected]
