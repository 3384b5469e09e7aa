"""Rows gone wild: problems that everything after can work with, or one sentence."""

import json
import pickle
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from row_writing import rows_of, write_rows

from pat_jax.common.errors import UserError
from pat_jax.rl.data.row_report import RowReport
from pat_jax.rl.data.rows import read_rows
from pat_jax.rl.data.schemas import ProblemSchema

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
