"""Files as people have them, read without editing; and one sentence where that cannot be."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_writing import SUFFIXES, write, write_lines, write_rows

from pat_jax.common.errors import UserError
from pat_jax.rl.data.problem_files import INSTRUCTION, Columns, Row, read_problem_file

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


def read(path: Path, columns: Columns | None = None, **options: Any) -> list[Row]:
    return list(read_problem_file(path, columns, **options).rows)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(words, numbers), min_size=1, max_size=4), st.sampled_from(SUFFIXES))
@pytest.mark.parametrize("name", FORMATS)
def test_a_published_format_is_read_as_it_is(tmp_path_factory, name: str, problems, suffix: str):
    make, shown = FORMATS[name]
    rows = [make(text, answer) for text, answer in problems]
    path = write_rows(tmp_path_factory.mktemp("rows") / f"a{suffix}", rows)
    found = read(path)
    assert [row.number for row in found] == list(range(1, len(rows) + 1))
    for row, source, (text, answer) in zip(found, rows, problems, strict=True):
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
        (row,) = read(path, Columns(prompt, answer))
        assert (row.prompt, row.columns["answer"]) == expected
    (row,) = read(path, Columns("q.en", "a.b.c"), is_compared=False)
    assert row.columns["answer"] == [{}, 1] and row.columns["prompt"] == "not this"
    with pytest.raises(UserError, match=r"prompt_key is 'q\.fr': .*a\.jsonl has the columns"):
        read(path, Columns("q.fr"))
    with pytest.raises(UserError, match=r"--data\.answer_key is 'b'.* column\.field"):
        read(path, Columns("", "b"))


@pytest.mark.parametrize(
    "columns", [Columns("q", "q"), Columns("a.b", "a.b"), Columns("p", "P"), Columns("", "prompt")]
)
def test_a_column_cannot_be_prompt_and_answer(tmp_path, columns):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "?", "q": "1", "P": "3", "a": {"b": "2"}})
    message = r"a\.jsonl: the column '.*' cannot be both prompt and answer"
    with pytest.raises(UserError, match=message):
        read(path, columns)


def test_a_named_problem_is_followed_by_the_instruction(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"x": {"Problem": "1?", "task": "2?"}})
    assert read(path, Columns("x.Problem"))[0].prompt == f"1?\n{INSTRUCTION}"
    assert read(path, Columns("x.task"))[0].prompt == "2?"


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
    file = read_problem_file(path, is_compared=is_compared)
    assert [row.number for row in file.rows] == [2] and file.last_number == 3
    assert file.without_answer == [f"{path}, line {n}, field 'answer'" for n in (1, 3)]


def test_a_solution_without_an_answer_is_left_out(tmp_path):
    rows = [
        {"problem": "?", "solution": text} for text in ("We see.\nDone.", solved(3), "#### 4", "5")
    ]
    file = read_problem_file(write(tmp_path / "a.json", rows))
    assert [row.columns["answer"] for row in file.rows] == ["3", "4", "5"]
    assert file.without_answer == [f"{tmp_path}/a.json, row 1, field 'solution'"]


# --- bad input -------------------------------------------------------------------------------

PROBLEM = {"problem": "1 + 1?", "answer": "2"}
QUESTION = {"question": "Half of 4000?", "answer": "4000 / 2 = 2000\n#### 2,000"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"text": "a"}], r"a\.json has the columns text: expected one of prompt, problem"),
        ([{}], r"a\.json has the columns none: expected one of prompt"),
        ([PROBLEM, {"problem": "a"}], r"row 2, has no field 'answer', which other rows have"),
        ([PROBLEM, {"prompt": "a"}], "row 1, has no field 'prompt', which other rows have"),
        ([{**PROBLEM, "problem": None}], "row 1, field 'problem', is None: expected text"),
        ([{"prompt": ""}], "row 1, field 'prompt', is '': expected text that is not empty"),
        ([{"prompt": []}], r"row 1, field 'prompt', is \[\]: expected chat messages"),
        ([{"prompt": [{"role": "user"}]}], "row 1, field 'prompt', .* role and content"),
        ([{"prompt": "a\ud800"}], "row 1, field 'prompt', .* expected whole characters"),
        ([{"prompt": [{"role": "\ud800", "content": "a"}]}], "row 1, .* whole characters"),
        ([{"prompt": [{"role": "a", "content": "a", "x": ["\udfff"]}]}], "row 1, .* whole char"),
        ([{"prompt": "a", "completions": 1}], "row 1, has a field 'completions'"),
        ([QUESTION, {**QUESTION, "answer": "18"}], "row 2, field 'answer', is '18': .* '#### '"),
        ([{**QUESTION, "answer": "so ####  "}], "row 1, field 'answer', .* '#### '"),
    ],
)
def test_bad_rows_say_what_and_where(tmp_path, content, message):
    path = write(tmp_path / "a.json", content)
    with pytest.raises(UserError, match=message) as error:
        read_problem_file(path)
    assert str(path) in str(error.value) and "first row" not in str(error.value)
