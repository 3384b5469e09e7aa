"""Files of lengths: every format says the same, and every mistake is told by file and line."""

from pathlib import Path

import numpy as np
import pytest

from pat_jax.common.errors import UserError
from pat_jax.profiling.simulate.length_files import find_lengths, read_lengths


@pytest.fixture
def write(tmp_path: Path):
    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return written


FORMATS = [
    ("a.csv", "512\n1024\n512\n"),
    ("a.csv", "output_tokens\n512\n1024\n\n512\n"),
    ("a.csv", "anything\n512\n1024\n512\n"),
    ("a.csv", "id,output_tokens\nx,512\ny,1024\nz,512.0\n"),
    ("a.csv", "output_tokens,count\n1024,1\n512,2\n7,0\n"),
    ("a.json", "[512, 1024, 512]"),
    ("a.json", '[\n {"output_tokens": 512, "count": 2},\n {"length": 1024}\n]'),
    ("a.jsonl", '512\n1024\n\n{"response_tokens": 512}\n'),
    ("a.jsonl", '{"usage": {"completion_tokens": 512}}\n{"length": 512}\n1024\n0\n'),
]


@pytest.mark.parametrize(("name", "text"), FORMATS)
def test_every_format_says_the_same(write, name: str, text: str):
    lengths = read_lengths(write(name, text))
    probabilities = np.array([0.1, 0.6, 0.7, 0.99])
    assert lengths.quantile(probabilities).tolist() == [512, 512, 1024, 1024]
    assert lengths.mean(cap=600) == pytest.approx((512 + 512 + 600) / 3)
    assert lengths.source == f"{name}, 3 responses" and lengths.prompts is None


def test_prompts_are_read_where_all_rows_have_them(write):
    lengths = read_lengths(write("a.csv", "prompt_tokens,output_tokens\n9,30\n7,10\n"))
    assert lengths.tokens.tolist() == [10, 30]
    assert lengths.prompts is not None and lengths.prompts.tolist() == [7, 9]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "", "no rows"),
        ("a.csv", "output_tokens\n", "no rows"),
        ("a.json", "[]", "no rows"),
        ("a.csv", "0\n0\n", "none of its 2 rows"),
        ("a.csv", "5\n-3\n", "line 2: a response of '-3' tokens"),
        ("a.csv", "output_tokens\n5\n\n5.5\n", "line 4: a response of '5.5' tokens"),
        ("a.csv", "5\nmany\n", "line 2: a response of 'many' tokens"),
        ("a.csv", "nan\n", "line 1: a response of 'nan' tokens"),
        ("a.csv", "output_tokens,count\n5,-1\n", "line 2: '-1' responses"),
        ("a.csv", "output_tokens,count\n5\n", "line 2: 1 columns, expected the 2"),
        ("a.csv", "a,b\n1,2\n", "line 1: columns a, b, expected one column alone"),
        ("a.csv", "prompt_tokens,output_tokens\n-1,5\n", "line 2: a prompt of '-1' tokens"),
        ("a.json", "[1,\n2,\n-3]", "row 3: a response of -3 tokens"),
        ("a.json", "[1,\n2.5]", "row 2: a response of 2.5 tokens"),
        ("a.json", "[1,\n{}]", "row 2: fields none, expected one of output_tokens"),
        ("a.json", "[1\n2]", "broken JSON"),
        ("a.json", '{"a": 1}', "expected one array"),
        ("a.jsonl", "1\n{\n", "line 2, column 2: broken JSON"),
        ("a.jsonl", '1\n{"tokens": 3}\n', "line 2: fields tokens, expected one of"),
        ("a.txt", "1\n", "expected a file named .csv, .json or .jsonl"),
    ],
)
def test_every_mistake_is_told(write, name: str, text: str, words: str):
    path = write(name, text)
    with pytest.raises(UserError) as caught:
        read_lengths(path)
    message = str(caught.value)
    assert message.startswith(f"lengths {path}") and words in message
    assert message.endswith(".") and "\n" not in message


def test_bytes_that_are_no_text(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as text"):
        read_lengths(path)


def test_neither_a_file_nor_built_in():
    with pytest.raises(UserError, match=r"'reasonable'.*reasoning, pat, math, short"):
        find_lengths("reasonable")
