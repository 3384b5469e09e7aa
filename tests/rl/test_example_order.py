"""From files to examples: what is learned of each row, what is left out, what is held out, and order."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_readers import assistant, user
from row_writing import write_lines, write_rows
from tokenizer_files import BOS, write_tokenizer

from pat_jax.common.errors import UserError
from pat_jax.rl.algorithm.supervised import to_example_batch
from pat_jax.rl.data import text_reader
from pat_jax.rl.data.example_reader import ExampleReader
from pat_jax.rl.data.examples import Example, Examples
from pat_jax.rl.data.schemas import ExampleSchema
from pat_jax.rl.data.text_reader import TextRead, TextReader, TextRows
from pat_jax.rl.text.tokenizer import BYTE_TOKENIZER, HuggingFaceTokenizer


def shown(tokenizer: HuggingFaceTokenizer, example: Example) -> tuple[str, str]:
    """The whole text, special tokens too, and what of it is learned."""

    def text(tokens: np.ndarray) -> str:
        return tokenizer._tokenizer.decode(tokens.tolist())

    return text(example.tokens), text(example.tokens[example.in_loss])


def read(
    folder: Path, tokenizer: HuggingFaceTokenizer, *rows: dict, suffix: str = ".jsonl", **options
) -> list[tuple[str, str]]:
    """Of the examples in a file with these rows, as `shown`."""
    path = write_rows(folder / f"rows{suffix}", rows)
    found = ExampleReader(tokenizer, 100, **options).read([path], 0.0)
    return [shown(tokenizer, example) for example in found.train]


CHAT = "<im>user:a<eos><im>assistant:b<eos>"


@pytest.mark.parametrize(
    ("row", "whole", "learned"),
    [
        ({"prompt": "a", "completion": "b"}, CHAT, "b<eos>"),
        ({"prompt": [user("a")], "completion": [assistant("b")]}, CHAT, "b<eos>"),
        ({"prompt": "a", "completion": [assistant("b")], "text": "no"}, CHAT, "b<eos>"),
        ({"messages": [user("a"), assistant("b")], "prompt": "no"}, CHAT, "b<eos>"),
        ({"Messages": [user("a"), assistant("b")] * 2}, CHAT * 2, "b<eos>" * 2),
        ({"text": "ab"}, "<bos>ab<eos>", "ab<eos>"),
    ],
)
def test_what_is_learned_of_a_row(tmp_path, chatty, row, whole, learned):
    for suffix in (".jsonl", ".parquet"):
        assert read(tmp_path, chatty, row, suffix=suffix) == [(whole, learned)]


def test_what_options_change(tmp_path, plain, chatty):
    row = {"prompt": "the", "completion": " the"}  # without a chat template one follows the other
    assert read(tmp_path, plain, row) == [("<bos>the the<eos>", " the<eos>")]
    every = [("<bos>the the<eos>", "the the<eos>")]
    assert read(tmp_path, plain, row, completion_only=False) == every
    row = {"messages": [user("a"), assistant("b")]}
    every = [(CHAT, CHAT.removeprefix("<im>"))]
    assert read(tmp_path, chatty, row, assistant_only=False) == every
    row, schema = {"row": {"q": "a"}, "A": "b", "text": "no"}, ExampleSchema("row.q", "a")
    assert read(tmp_path, chatty, row, schema=schema) == [(CHAT, "b<eos>")]


def test_long_rows_are_left_out_or_cut(tmp_path, plain):
    rows = [{"prompt": "a" * n, "completion": "b" * m} for n, m in ((3, 3), (3, 9), (8, 3), (7, 3))]
    path = write_rows(tmp_path / "rows.json", rows)
    found = ExampleReader(plain, 8).read([path], 0.0)
    assert [shown(plain, one)[0] for one in found.train] == ["<bos>aaabbb<eos>"]
    assert str(found) == (
        "examples: 1 to learn from; left out: 3 longer than 8 tokens (a limit of 14 keeps 99 %)"
    )
    found = ExampleReader(plain, 14, option="--max_length").read([path], 0.0)
    assert str(found) == "examples: 4 to learn from; left out: 0 longer than 14 tokens"
    found = ExampleReader(plain, 9, is_truncated=True).read([path], 0.0)
    assert [shown(plain, one) for one in found.train] == [
        ("<bos>aaabbb<eos>", "bbb<eos>"),
        ("<bos>aaabbbbb", "bbbbb"),
        ("<bos>aaaaaaab", "b"),
    ]
    assert str(found) == (
        "examples: 3 to learn from; cut: 3 longer than 9 tokens; left out: 1 cut before what is learned"
    )


def test_what_is_held_out_depends_on_the_prompt_alone(tmp_path, plain):
    rows = [{"prompt": f"{i}", "completion": f"{j}"} for i in range(40) for j in range(2)]
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    write_lines(one, *rows)
    write_lines(other, *reversed(rows))
    reader = ExampleReader(plain, 20)
    found, again = reader.read([one], 0.3), reader.read([other], 0.3)

    def texts(examples: Sequence[Example]) -> list[str]:
        return sorted(plain.decode(example.tokens.tolist()) for example in examples)

    assert texts(found.heldout) == texts(again.heldout)
    assert 0 < len(found.heldout) < 40 and len(found.heldout) % 2 == 0
    assert len(found.train) + len(found.heldout) == 80
    assert str(found).startswith(
        f"examples: {len(found.train)} to learn from, {len(found.heldout)} held"
    )


def numbered(count: int) -> list[Example]:
    return [Example(np.array([i, i], np.int32), np.array([False, True])) for i in range(count)]


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_an_epoch_has_each_example_once(count, size, epoch, seed):
    examples = Examples(numbered(count), seed=seed)
    position, drawn = epoch * count, []
    for _ in range(examples.batches_per_epoch(size)):
        batch = examples.draw(position, size)
        again = Examples(numbered(count), seed=seed).draw(position, size)
        assert [x.tokens[0] for x in batch] == [x.tokens[0] for x in again]
        assert 1 <= len(batch) <= size
        drawn += [int(one.tokens[0]) for one in batch]
        position += len(batch)
    assert Counter(drawn) == Counter(range(count)) and position == (epoch + 1) * count


# --- texts, as rows of tokens: nothing is lost, each is learned once ------------------------------

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
    assert {len(row) for row in list(found.train)[:-1]} <= {max_length}


@given(st.lists(st.text("ab \n").map("a{}".format), min_size=1), st.integers(2, 20))
def test_a_text_is_seen_by_itself_alone(texts: list[str], max_length: int):
    """A position counts from the text's beginning, or from the row's where that is later."""
    rows = rows_of(*texts, max_length=max_length).train
    batch = list(to_example_batch(list(rows), [(len(rows), max_length)]).mini_batches[0])
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
