"""Texts to rows of tokens: nothing is lost, each token is learned once, and texts are apart."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_writing import write_lines
from tokenizer_files import BOS, write_tokenizer

from pat_jax.common.errors import UserError
from pat_jax.rl.algorithm.supervised import to_example_batch
from pat_jax.rl.data import text_reader
from pat_jax.rl.data.example_reader import ExampleReader
from pat_jax.rl.data.examples import Examples
from pat_jax.rl.data.schemas import ExampleSchema
from pat_jax.rl.data.text_reader import TextRead, TextReader
from pat_jax.rl.data.text_rows import TextRows
from pat_jax.rl.text.tokenizer import BYTE_TOKENIZER, HuggingFaceTokenizer

END = 256
BYTES = HuggingFaceTokenizer(BYTE_TOKENIZER)


def rows_of(*texts: str, max_length: int, share: float = 0.0) -> TextRead:
    reader = TextReader(BYTES, share)
    for text in texts:
        reader.add(text)
    return reader.result(max_length)


def joined(rows: TextRows) -> list[int]:
    """The tokens of all rows, of which each begins with the last one of the row before."""
    first, *others = [row.tokens.tolist() for row in rows]
    assert all(row[0] == before[-1] for row, before in zip(others, [first, *others], strict=False))
    return [*first, *(token for row in others for token in row[1:])]


def test_tokens_are_bytes():
    every = bytes(range(128)).decode() + "é€𝄞 "
    assert BYTES.is_bytes and BYTES.encode(every) == list(every.encode())
    assert BYTES.decode([*every.encode(), END]) == every
    assert BYTES.eos_ids == (END,) and BYTES.vocab_size == 257


@given(st.lists(st.text(), min_size=1), st.integers(2, 20))
def test_rows_are_the_corpus_and_an_epoch_has_each_token_once(texts: list[str], max_length: int):
    found, kept = rows_of(*texts, max_length=max_length), [x for x in texts if x.strip()]
    assert found.num_texts == len(kept) and found.num_blank == len(texts) - len(kept)
    corpus = b"".join(text.encode() + b"|" for text in kept)
    if not kept:
        assert len(found.train) == 0
        return
    tokens = joined(found.train)
    assert tokens[0] == tokens[-1] == END and len(found.heldout) == 0
    assert bytes(ord("|") if token == END else token for token in tokens[1:]) == corpus
    examples = Examples(found.train, seed=1)
    epoch = examples.draw(0, len(examples))
    targets = sorted(t for row in epoch for t in row.tokens[row.in_loss].tolist())
    assert targets == sorted(tokens[1:]) and found.train.num_targets == len(corpus)
    assert {len(row) for row in found.train[:-1]} <= {max_length}


@given(st.lists(st.text("ab \n").map("a{}".format), min_size=1), st.integers(2, 20))
def test_a_text_is_seen_by_itself_alone(texts: list[str], max_length: int):
    """A position counts from the text's beginning, or from the row's where that is later."""
    rows = rows_of(*texts, max_length=max_length).train
    batch = list(to_example_batch(rows[:], [(len(rows), max_length)]).mini_batches[0])
    last = sum(len(row) for row in rows) - 1  # the last end token has no text behind it
    place, count = 0, 0
    for row in rows:
        for i, token in enumerate(row.tokens):
            is_start = i == 0 or (token == END and place < last)
            count = 0 if is_start else count + 1
            assert row.positions[i] == count
            place += 1
    assert sum(int((micro.weights > 0).sum()) for micro in batch) == rows.num_targets


def test_a_beginning_of_sequence_token_begins_a_text(tmp_path: Path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, eos_token="<eos>"))
    path = write_lines(tmp_path / "rows.jsonl", {"text": "ab"}, {"text": "c<eos>"})
    (row,) = ExampleReader(tokenizer, 99).read([path], 0.0).train
    (a, b, c), end = tokenizer.encode("abc"), tokenizer.eos_ids[0]
    assert row.tokens.tolist() == [BOS, a, b, end, BOS, c, end]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]


@given(st.integers(0, 200), st.integers(2, 9))
def test_a_long_text_is_held_out_in_parts(count: int, max_length: int):
    text = "".join(f"line {i}\n" for i in range(count)) or "x"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_reader, "PART_LENGTH", 30)
        found = rows_of(text, max_length=max_length, share=0.3)
        again = rows_of("before", text, max_length=max_length, share=0.3)
    parts = [joined(rows) for rows in (found.train, found.heldout) if len(rows)]
    letters = sorted(token for part in parts for token in part if token != END)
    assert letters == sorted(text.encode())
    if len(found.heldout):
        assert joined(found.heldout) == joined(again.heldout)
        assert count < 150 or 0.1 < found.heldout.num_bytes / len(text) < 0.5


def test_a_loss_per_byte():
    """Of a uniform guess among 256 tokens: 8 bits for each byte and the end of each text."""
    rows = rows_of("abc", "d", max_length=4).train
    assert 8 * rows.tokens_per_byte == pytest.approx(8 * (4 + 2) / 4)


def test_the_same_text_in_files_of_each_kind(tmp_path: Path):
    texts = ["some text\n", "é\r\n<|endoftext|>"]
    rows = write_lines(tmp_path / "rows.jsonl", *({"text": text} for text in texts))
    files = [tmp_path / "a.txt", tmp_path / "b"]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text.encode())
    one, other = (ExampleReader(BYTES, 9).read(paths, 0.0).train for paths in ([rows], files))
    assert [row.tokens.tolist() for row in one] == [row.tokens.tolist() for row in other]
    assert one[0].tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.bin", b"ab\xff", r"a\.bin is not UTF-8 text \(byte 0xff at offset 2\)"),
        ("a.txt", "ab".encode("utf-16-le"), r"a\.txt is not UTF-8 text \(byte 0x00 at offset 1\)"),
        ("a.csv", b"prompt,completion\n", r"a\.csv ends in '\.csv': expected one of \.json"),
    ],
)
def test_a_file_that_is_no_text_is_one_sentence(tmp_path: Path, name, data, words):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError, match=words) as caught:
        ExampleReader(BYTES, 9).read([path], 0.0)
    assert str(caught.value).endswith(".")


def test_forms_that_contradict(tmp_path: Path):
    text = tmp_path / "a.txt"
    text.write_text("a")
    rows = write_lines(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    with pytest.raises(
        UserError, match=r"a\.txt, is plain text, but .*rows\.jsonl, line 1, field 'comp"
    ):
        ExampleReader(BYTES, 9).read([text, rows], 0.0)
    schema = ExampleSchema(prompt="a")
    with pytest.raises(
        UserError, match=r"--data.prompt_key names a column, but .*a\.txt is plain text"
    ):
        ExampleReader(BYTES, 9, schema=schema).read([text], 0.0)
