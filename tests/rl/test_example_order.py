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

from pat_jax.rl.data.example_reader import ExampleReader
from pat_jax.rl.data.examples import Example, Examples
from pat_jax.rl.data.schemas import ExampleSchema
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer


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
