"""Damaged files of rows: one sentence with the file and the line."""

import json
import pickle
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from row_writing import SUFFIXES, rows_of, write, write_lines, write_rows

from pat_jax.common.errors import UserError
from pat_jax.rl.data.row_files import read_records
from pat_jax.rl.data.row_report import RowReport
from pat_jax.rl.data.rows import read_rows
from pat_jax.rl.data.schemas import ProblemSchema

ROWS = [{"prompt": f"{number}", "a": {"b": [number, None]}} for number in range(5)]


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_records(path)
    message = str(caught.value)
    assert str(path) in message and message.endswith(".") and len(message) < 500
    return message


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".JSONL", ".Parquet"])
def test_every_kind_of_file_has_the_same_rows(tmp_path, suffix: str):
    written = write_rows(tmp_path / f"a{suffix.lower()}", ROWS)
    records = read_records(written.rename(tmp_path / f"b{suffix}"))
    assert [record.fields for record in records] == ROWS
    assert [record.number for record in records] == [1, 2, 3, 4, 5]


DEEP, LONG = "[" * 5000 + "]" * 5000, "9" * 5000
BROKEN = {
    '{"prompt": }': "column 12, is broken JSON (Expecting value)",
    '{"a": 1} {"a": 2}': "is broken JSON (Extra data)",
    f'{{"a": {DEEP}}}': "is JSON nested more than 100 deep",
    f'{{"a": {"[" * 200}1{"]" * 200}}}': "is JSON nested more than 100 deep",
    f'{{"a": {LONG}}}': "is JSON with an integer of more than 4,300 digits",
    "[1]": "is [1]: expected an object with fields",
    "null": "is None: expected an object with fields",
    f'{{"prompt": "{"x" * 10**6}': "is broken JSON",
}


@pytest.mark.parametrize(("text", "words"), BROKEN.items(), ids=range(len(BROKEN)))
def test_a_broken_line_is_named(tmp_path, text: str, words: str):
    path = write(tmp_path / "a.jsonl", f'{{"prompt": "a"}}\n\n{text}\n{{"prompt": "b"}}')
    message = refusal(path)
    assert f"{path}, line 3" in message and words in message


@pytest.mark.parametrize(("text", "words"), BROKEN.items(), ids=range(len(BROKEN)))
def test_a_broken_array_is_refused(tmp_path, text: str, words: str):
    message = refusal(write(tmp_path / "a.json", f'[{{"prompt": "a"}},\n{text}]'))
    assert words.partition("is ")[2].partition(" (")[0] in message


@given(st.integers(0, 3), st.binary(min_size=1, max_size=4))
def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path_factory, before: int, junk: bytes):
    data = b'{"prompt": "a"}\n' * before + b'{"prompt": "' + junk
    try:
        data.decode()
    except UnicodeDecodeError:
        line = data.count(b"\n", 0, len(b'{"prompt": "a"}\n' * before)) + 1
        path = tmp_path_factory.mktemp("bytes") / "a.jsonl"
        path.write_bytes(data)
        message = refusal(path)
        assert "is not UTF-8 text" in message or "is broken JSON" in message  # a line break in junk
        if b"\n" not in junk:
            assert f"{path}, line {line}, is not UTF-8 text" in message


def test_an_array_that_is_no_text(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"prompt": "a"},\n {"prompt": "\xff"}]')
    assert f"{path}, line 2, is not UTF-8 text (invalid start byte)" in refusal(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"}', "line 2, column 1, is broken JSON (Extra data)"),
        ({"prompt": "a"}, "expected an array of objects at the top"),
        (["a"], "row 1, is 'a': expected an object"),
        ([], "holds no problems"),
        ("", "holds no problems"),
        (" \n", "holds no problems"),
    ],
)
def test_an_array_is_expected(tmp_path, content, words: str):
    assert words in refusal(write(tmp_path / "a.json", content))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_damaged_parquet_file_is_refused_or_read(tmp_path_factory, data):
    """Cut anywhere, or with any byte changed."""
    path = write_rows(tmp_path_factory.mktemp("parquet") / "a.parquet", ROWS)
    sound = path.read_bytes()
    at = data.draw(st.integers(0, len(sound) - 1))
    is_cut = data.draw(st.booleans())
    changed = bytes([sound[at] ^ data.draw(st.integers(1, 255))]) + sound[at + 1 :]
    path.write_bytes(sound[:at] + (b"" if is_cut else changed))
    try:
        read_records(path)
    except UserError as error:
        assert str(path) in str(error)
    else:
        assert not is_cut


def test_parquet_that_python_cannot_hold(tmp_path):
    path = tmp_path / "a.parquet"
    text = pyarrow.array([b"\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), path)
    assert "file (after 0 rows: column 'prompt' of type string: 'utf-8' codec" in refusal(path)
    when = pyarrow.array([2**62], pyarrow.timestamp("ms"))
    pyarrow.parquet.write_table(pyarrow.table({"when": when}), path)
    assert "is not a readable Parquet file" in refusal(path)
    write(path, "PAR1 no")
    assert "is not a readable Parquet file" in refusal(path)


def test_files_that_are_not_there_or_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "ends in '.csv': expected one of .json" in refusal(write(tmp_path / "a.csv", "prompt"))
    assert "ends in 'no extension': expected" in refusal(Path("maths"))
    assert "does not exist" in refusal(tmp_path / "absent.json")
    for name in ("a.json", "b.parquet", "c"):
        (tmp_path / name).mkdir()
        assert "is a folder: expected a file; name the files in it" in refusal(tmp_path / name)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = write(tmp_path / "a.jsonl", "\ufeff" + json.dumps(ROWS[0]) + "\r\n\u2028\n")
    assert "line 2, column 1, is broken JSON" in refusal(path)
    path = write_lines(tmp_path / "b.jsonl", {"prompt": "\u2028\x85"})
    assert read_records(path)[0].fields == {"prompt": "\u2028\x85"}


# --- rows gone wild: problems that all after can work with, or one sentence -----------------------

texts = st.text(max_size=8) | st.sampled_from(["\ud800", "#### 4", "\\boxed{3}", "user", "a.b"])
scalars = st.none() | st.booleans() | st.floats() | texts
scalars |= st.integers() | st.sampled_from([2**64, -(10**20), 10**4000])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
messages = st.lists(
    st.fixed_dictionaries({"role": texts, "content": texts}, optional={"x": values}), max_size=3
)
NAMES = ["prompt", "problem", "Question", "messages", "answer", "solution", "reward_model"]
NAMES += ["ground_truth", "data_source", "finish_reason", "tools", "chat_template_kwargs", "images"]
truths = st.dictionaries(st.just("ground_truth"), values)
rows = st.dictionaries(st.sampled_from(NAMES) | texts, values | messages | truths, max_size=5)


def check(path: Path, schema: ProblemSchema) -> None:
    try:
        numbered = list(read_rows([path], schema, RowReport()))
    except UserError as error:
        message = str(error)
        assert str(path) in message and message.endswith(".") and "\n" not in message
        assert len(message) < 2000
        return
    assert len(dict(numbered)) == len(numbered)
    for _, row in numbered:
        parts = [row.prompt] if isinstance(row.prompt, str) else [m["content"] for m in row.prompt]
        assert row.text.encode() and "".join(parts).encode()
        pickle.dumps(row.columns)  # sent to the processes that score
        if schema.is_compared and "answer" in row.columns:
            answer = row.columns["answer"]
            assert isinstance(answer, str) and answer.strip() and answer != "None"


@settings(max_examples=80, deadline=None)
@given(
    st.lists(rows | values, min_size=1, max_size=3),
    st.sampled_from([".json", ".jsonl"]),
    st.builds(ProblemSchema, st.just("") | texts, st.just("") | texts, st.booleans()),
)
@example([{"prompt": "?", "answer": None}], ".json", ProblemSchema())
@example([{"prompt": "?", "answer": 10**300}], ".jsonl", ProblemSchema())
def test_any_rows_are_problems_or_refused(tmp_path_factory, rows, suffix, schema):
    path = write_rows(tmp_path_factory.mktemp("wild") / f"a{suffix}", rows)
    check(path, schema)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([".json", ".jsonl", ".parquet"]), st.binary(max_size=60), st.booleans())
@example(".jsonl", b'{"prompt": "a"}\x00\n', False)
@example(".json", json.dumps([{"prompt": "a"}]).encode("utf-16"), False)
def test_any_bytes_are_problems_or_refused(tmp_path_factory, suffix, junk, is_compared):
    path = tmp_path_factory.mktemp("bytes") / f"a{suffix}"
    path.write_bytes(junk)
    check(path, ProblemSchema(is_compared=is_compared))


def test_parquet_with_two_columns_of_one_name(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["x", "x"])
    pyarrow.parquet.write_table(table.rename_columns(["prompt", "prompt"]), path)
    with pytest.raises(UserError, match="is not a readable Parquet file"):
        rows_of(path, ProblemSchema())
