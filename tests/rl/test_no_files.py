"""Names of data that are no files: devices, pipes, sockets, folders, rings; and Parquet that unpacks without end."""

import os
import socket
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from row_writing import rows_of

from pat_jax.batch_generation.prompt_lines import read_lines
from pat_jax.batch_generation.result_file import ResultFile
from pat_jax.common.errors import UserError
from pat_jax.common.run_command import in_one_sentence
from pat_jax.config.command_line import parse
from pat_jax.planning.latency.profile import read_profile
from pat_jax.profiling.simulate.length_files import find_lengths
from pat_jax.rl.data import row_files
from pat_jax.rl.data.row_files import read_text_file
from pat_jax.rl.data.schemas import ExampleSchema, PairSchema, ProblemSchema

READERS = {
    "problems": lambda path: rows_of(path, ProblemSchema()),
    "examples": lambda path: rows_of(path, ExampleSchema()),
    "pairs": lambda path: rows_of(path, PairSchema()),
    "text": read_text_file,
    "prompts": lambda path: list(read_lines(path)),
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
