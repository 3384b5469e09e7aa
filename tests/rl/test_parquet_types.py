"""Types that a Parquet file declares are read as what they stand for."""

import json
import os
import socket
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow as pa
import pyarrow.parquet
import pytest
from row_writing import rows_of

from pat_jax.batch_generation.prompts import PromptFile
from pat_jax.batch_generation.result_file import ResultFile
from pat_jax.common.errors import UserError
from pat_jax.common.run_command import in_one_sentence
from pat_jax.config.command_line import parse
from pat_jax.planning.latency.profile import read_profile
from pat_jax.profiling.simulate.length_files import find_lengths
from pat_jax.rl.data import row_files
from pat_jax.rl.data.row_files import read_records, read_text_file
from pat_jax.rl.data.schemas import ExampleSchema, PairSchema, ProblemSchema

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
STRUCT = pa.struct([("role", pa.string()), ("content", pa.string())])


def write(tmp_path, **columns):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


def in_json(*values: object) -> pa.Array:
    texts = pa.array([json.dumps(value) for value in values])
    if not hasattr(pa, "json_"):
        pytest.skip("this pyarrow writes no JSON")
    return pa.ExtensionArray.from_storage(pa.json_(), texts)


MAPS = pa.list_(pa.map_(pa.string(), pa.string()))
BYTES = pa.list_(pa.struct([("role", pa.binary()), ("content", pa.binary())]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: pa.array([CHAT], pa.list_(STRUCT)),
        lambda: pa.array([CHAT], pa.large_list(STRUCT)),
        lambda: in_json(CHAT),
        lambda: pa.array([json.dumps(CHAT)], pa.large_string()),
        lambda: pa.array([json.dumps(CHAT)]).dictionary_encode(),
        lambda: pa.array([json.dumps(CHAT).encode()], pa.binary()),
        lambda: pa.array([[[*message.items()] for message in CHAT]], MAPS),
        lambda: pa.array([[{k: v.encode() for k, v in x.items()} for x in CHAT]], BYTES),
        lambda: pa.array([{key: [x[key] for x in CHAT] for key in ("role", "content")}]),
        lambda: pa.array([[json.dumps(message) for message in CHAT]]),
    ],
    ids=["struct", "large", "json", "text", "enum", "binary", "map", "bytes", "lists", "texts"],
)
def test_a_chat_is_read_whatever_its_type(tmp_path, make):
    (row,) = rows_of(write(tmp_path, messages=make()), ExampleSchema())
    assert row.prompt is None and row.responses == [CHAT]


def test_text_declared_as_json_is_its_value(tmp_path):
    path = write(
        tmp_path,
        prompt=in_json("2+2?", CHAT[:1]),
        reward_model=in_json({"ground_truth": 4}, {"ground_truth": "5"}),
    )
    one, other = rows_of(path, ProblemSchema())
    assert one.prompt == "2+2?" and other.prompt == CHAT[:1]
    assert [row.columns["answer"] for row in (one, other)] == ["4", "5"]


def test_numbers_times_and_bytes(tmp_path):
    path = write(
        tmp_path,
        prompt=pa.array([b"2+2?"], pa.binary()),
        answer=pa.array([Decimal("1000.50")]),
        at=pa.array([1577836800000000001], pa.timestamp("ns", "Europe/Berlin")),
        image=pa.array([b"\x89PNG\xff"], pa.binary()),
    )
    (row,) = rows_of(path, ProblemSchema())
    assert row.prompt == "2+2?" and row.columns["answer"] == "1000.50"
    at = row.columns["at"]
    assert type(at) is datetime and at.timestamp() == 1577836800  # pandas has one of its own
    assert row.columns["image"] == b"\x89PNG\xff"


def test_a_margin_may_be_a_decimal_number(tmp_path):
    texts = {name: pa.array([name]) for name in ("prompt", "chosen", "rejected")}
    path = write(tmp_path, margin=pa.array([Decimal("1.25")]), **texts)
    (row,) = rows_of(path, PairSchema())
    assert row.margin == 1.25


def test_a_type_that_python_has_not_is_named(tmp_path):
    path = write(tmp_path, prompt=pa.array(["a"]), at=pa.array([2**60], pa.timestamp("ms")))
    with pytest.raises(UserError, match=r"column 'at' of type timestamp\[ms\]"):
        read_records(path)


def test_nulls_that_fill_arguments_are_left_out(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"f": {"a": 1}}]}
    other = call | {"tool_calls": [{"f": {"b": 2}}]}
    path = write(tmp_path, messages=pa.array([[*CHAT, call, other]]))
    (row,) = rows_of(path, ExampleSchema())
    assert row.responses == [[*CHAT, call, other]]


READERS = {
    "problems": lambda path: rows_of(path, ProblemSchema()),
    "examples": lambda path: rows_of(path, ExampleSchema()),
    "pairs": lambda path: rows_of(path, PairSchema()),
    "text": read_text_file,
    "prompts": lambda path: list(PromptFile(path)),
    "results": lambda path: ResultFile(path, resume=True),
    "options": lambda path: parse(["--config", str(path)]),
    "profile": read_profile,
    "lengths": lambda path: find_lengths(str(path)),
}
KINDS = ["pipe", "socket", "/dev/zero", "/dev/full", "/dev/null", "folder", "ring", "long", "deep"]


def make(kind: str, folder: Path, suffix: str) -> Path:
    path = folder / f"a{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "ring":
        path.symlink_to(path.name)
    elif kind.startswith("/dev/"):
        path.symlink_to(kind)
    elif kind == "long":
        return folder / f"{'x' * 300}{suffix}"
    else:
        return folder / ("d/" * 3000) / f"a{suffix}"
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, monkeypatch, reader: str, kind: str):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    for suffix in (".jsonl", ".json", ".parquet", ".yaml"):
        (folder := Path(suffix[1:])).mkdir()
        with pytest.raises(UserError) as caught, in_one_sentence():
            READERS[reader](make(kind, folder, suffix))
        sentence = str(caught.value)
        assert "\n" not in sentence and len(sentence) < 1300


def test_parquet_of_30_million_equal_rows(tmp_path: Path):
    path = tmp_path / "a.parquet"
    dictionary = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 1_000_000, "int8"), ["again"]
    )
    table = pyarrow.Table.from_arrays([pyarrow.chunked_array([dictionary] * 30)], ["prompt"])
    pyarrow.parquet.write_table(table, path)
    assert path.stat().st_size < 2**20
    with pytest.raises(
        UserError, match=r"a.parquet has 30,000,000 rows: expected at most 2,000,000"
    ):
        rows_of(path, ProblemSchema())


def test_parquet_of_few_rows_that_are_long(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(row_files, "MOST_BYTES", 2**24)
    path = tmp_path / "a.parquet"
    long = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 3000, "int8"), ["x" * 100_000])
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays([long], ["prompt"]), path)
    assert path.stat().st_size < 2**20
    with pytest.raises(UserError, match="GiB of values and more"):
        rows_of(path, ProblemSchema())
