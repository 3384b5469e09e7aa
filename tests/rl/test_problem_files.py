"""Files as people have them, read without editing; and one sentence where that cannot be."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_writing import SUFFIXES, rows_of, write, write_lines, write_rows

from pat_jax.common.errors import UserError
from pat_jax.rl.data.row_report import RowReport
from pat_jax.rl.data.rows import read_rows
from pat_jax.rl.data.schemas import INSTRUCTION, ProblemRow, ProblemSchema

# --- formats ---------------------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda text: text.strip() and "#" not in text
)
numbers = st.integers(-(2**62), 2**62)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def verl(text: str, answer: object) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": chat(text),
        "ability": "MATH",
        "reward_model": {"ground_truth": str(answer), "style": "rule"},
        "extra_info": {"index": "9a9b", "split": "train"},
    }


def dapo_processed(text: str, answer: object) -> dict[str, Any]:
    return {"prompt": text, "solution": str(answer), "source_prompt": chat("!"), **verl("?", 1)} | {
        "prompt": text,
        "reward_model": {"ground_truth": str(answer), "style": "rule"},
    }


def solved(answer: object) -> str:
    return f"First we think.\nThen \\[x = \\boxed{{{answer}}}.\\]\nThat was it."


ASKED = "{}\n{}".format  # with the instruction

# Each as a published file spells it, and what the policy reads: the text, and whether as a chat.
FORMATS = {
    "DAPO-Math-17k": (verl, chat),
    "DAPO-Math-17k-Processed": (dapo_processed, str),
    "TRL": (lambda text, answer: {"prompt": chat(text), "solution": str(answer)}, chat),
    "TRL, solved": (lambda text, answer: {"prompt": text, "solution": solved(answer)}, str),
    "MATH-500": (
        lambda text, answer: {
            "problem": text,
            "solution": solved(7),
            "answer": str(answer),
            "level": 2,
            "unique_id": "test/algebra/1.json",
        },
        ASKED,
    ),
    "NuminaMath": (
        lambda text, answer: {"problem": text, "solution": solved(answer), "messages": chat("!")},
        ASKED,
    ),
    "AIME 2024": (
        lambda text, answer: {"ID": "2024-I-1", "Problem": text, "Solution": "!", "Answer": answer},
        ASKED,
    ),
    "AIME 1983-2024": (
        lambda text, answer: {"Year": 1983, "Question": text, "Answer": answer, "Part": None},
        ASKED,
    ),
    "GSM8K": (
        lambda text, answer: {"question": text, "answer": f"So it is.\n#### {answer:,}"},
        ASKED,
    ),
    "messages": (lambda text, answer: {"messages": chat(text), "answer": answer}, chat),
    "ground_truth": (lambda text, answer: {"prompt": text, "ground_truth": answer}, str),
}
PROMPT_COLUMNS = {"prompt", "problem", "question", "messages"}


def read(path: Path, *columns: str, is_compared: bool = True) -> list[ProblemRow]:
    return rows_of(path, ProblemSchema(*columns, is_compared=is_compared))


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(words, numbers), min_size=1, max_size=4), st.sampled_from(SUFFIXES))
@pytest.mark.parametrize("name", FORMATS)
def test_a_published_format_is_read_as_it_is(tmp_path_factory, name: str, problems, suffix: str):
    make, shown = FORMATS[name]
    rows = [make(text, answer) for text, answer in problems]
    path = write_rows(tmp_path_factory.mktemp("rows") / f"a{suffix}", rows)
    numbered = dict(read_rows([path], ProblemSchema(), RowReport()))
    assert list(numbered) == list(range(1, len(rows) + 1))
    for row, source, (text, answer) in zip(numbered.values(), rows, problems, strict=True):
        expected = shown(text) if shown in (chat, str) else shown(text, INSTRUCTION)
        assert (row.text, row.prompt) == (text, expected)
        assert row.columns["answer"] == str(answer)
        for column, value in source.items():  # what reward functions are told
            if column.lower() not in PROMPT_COLUMNS - {"messages"} and column != "answer":
                assert column == "messages" or row.columns[column] == value


def test_columns_that_somebody_names(tmp_path):
    asked = {"en": "one?", "de": "eins?"}
    fields = {"prompt": "not this", "q": asked, "a": {"b.c": [{}, 1], "d": 5}}
    path = write_lines(tmp_path / "a.jsonl", {**fields, "x.y": "dotted", "answer": "not this"})
    for prompt, answer, expected in (
        ("q.de", "a.d", ("eins?", "5")),
        ("x.y", "", ("dotted", "not this")),
        ("", "x.y", ("not this", "dotted")),
    ):
        (row,) = read(path, prompt, answer)
        assert (row.prompt, row.columns["answer"]) == expected
    (row,) = read(path, "q.en", "a.b.c", is_compared=False)
    assert row.columns["answer"] == [{}, 1] and row.columns["prompt"] == "not this"


def test_a_named_problem_is_followed_by_the_instruction(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"x": {"Problem": "1?", "task": "2?"}})
    assert read(path, "x.Problem")[0].prompt == f"1?\n{INSTRUCTION}"
    assert read(path, "x.task")[0].prompt == "2?"


# --- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [(70.0, "70"), (0.5, "0.5"), (" 2 ", "2"), ("033", "033"), (-(10**40), f"-1{'0' * 40}")],
)
def test_answers_that_are_compared(tmp_path, value, expected):
    (row,) = read(write(tmp_path / "a.json", [{"problem": "?", "answer": value}]))
    assert row.columns["answer"] == expected


UNUSABLE = [["2"], {"a": 1}, True, "", " ", float("nan"), float("inf"), "\ud800", []]


@pytest.mark.parametrize(
    ("column", "answer"),
    [("prompt", "answer"), ("problem", "solution"), ("messages", "ground_truth")],
)
def test_an_answer_that_could_never_score_is_refused(tmp_path, column: str, answer: str):
    prompt = chat("?") if column == "messages" else "?"
    for value in UNUSABLE:
        rows = [{column: prompt, answer: "2"}, {column: prompt, answer: value}]
        path = write_lines(tmp_path / "a.jsonl", *rows)
        message = rf"a\.jsonl, line 2, field '{answer}', is .*: expected text"
        with pytest.raises(UserError, match=message):
            read(path)


def test_a_reward_function_of_the_user_may_do_with_any_answer(tmp_path):
    for value in UNUSABLE[:4]:
        rows = [{"prompt": "?", "answer": "2"}, {"prompt": "?", "answer": value}, {"prompt": "?"}]
        path = write_lines(tmp_path / "a.jsonl", *rows)
        told = [row.columns for row in read(path, is_compared=False)]
        assert told == [{"answer": "2"}, {"answer": value}, {}]


@pytest.mark.parametrize("is_compared", [True, False])
def test_a_null_answer_is_left_out_and_its_place_is_kept(tmp_path, is_compared: bool):
    rows = [{"question": "?", "answer": answer} for answer in (None, "2", None)]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    report, schema = RowReport(), ProblemSchema(is_compared=is_compared)
    assert [number for number, _ in read_rows([path, path], schema, report)] == [2, 5]
    assert report.without_answer == [f"{path}, line {n}, field 'answer'" for n in (1, 3)] * 2


def test_a_solution_without_an_answer_is_left_out(tmp_path):
    rows = [
        {"problem": "?", "solution": text} for text in ("We see.\nDone.", solved(3), "#### 4", "5")
    ]
    report, path = RowReport(), write(tmp_path / "a.json", rows)
    found = [row for _, row in read_rows([path], ProblemSchema(), report)]
    assert [row.columns["answer"] for row in found] == ["3", "4", "5"]
    assert report.without_answer == [f"{tmp_path}/a.json, row 1, field 'solution'"]
