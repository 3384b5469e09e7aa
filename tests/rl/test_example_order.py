"""From files to examples: what is learned of each row, what is left out, what is held out, and order."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_writing import write_lines, write_rows
from tokenizer_files import write_tokenizer

from pat_jax.common.errors import UserError
from pat_jax.rl.data.example_files import ExampleColumns
from pat_jax.rl.data.examples import Example, ExampleReader, Examples
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

TEMPLATE = (
    "{% for m in messages %}<im>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> HuggingFaceTokenizer:
    """Without a chat template, but with a token that begins a text."""
    folder = tmp_path_factory.mktemp("base")
    return HuggingFaceTokenizer(write_tokenizer(folder, eos_token="<eos>"))


@pytest.fixture(scope="module")
def chatting(tmp_path_factory) -> HuggingFaceTokenizer:
    folder = tmp_path_factory.mktemp("chatting")
    return HuggingFaceTokenizer(write_tokenizer(folder, eos_token="<eos>", chat_template=TEMPLATE))


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


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


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
def test_what_is_learned_of_a_row(tmp_path, chatting, row, whole, learned):
    for suffix in (".jsonl", ".parquet"):
        assert read(tmp_path, chatting, row, suffix=suffix) == [(whole, learned)]


def test_what_options_change(tmp_path, base, chatting):
    row = {"prompt": "the", "completion": " the"}  # without a chat template one follows the other
    assert read(tmp_path, base, row) == [("<bos>the the<eos>", " the<eos>")]
    every = [("<bos>the the<eos>", "the the<eos>")]
    assert read(tmp_path, base, row, completion_only=False) == every
    row = {"messages": [user("a"), assistant("b")]}
    every = [(CHAT, CHAT.removeprefix("<im>"))]
    assert read(tmp_path, chatting, row, assistant_only=False) == every
    row, columns = {"row": {"q": "a"}, "A": "b", "text": "no"}, ExampleColumns("row.q", "a")
    assert read(tmp_path, chatting, row, columns=columns) == [(CHAT, "b<eos>")]


@pytest.mark.parametrize("prompt", ["a", "Q", "x.y"])
def test_a_column_cannot_be_prompt_and_completion(tmp_path, chatting, prompt: str):
    path = write_rows(tmp_path / "rows.json", [{"a": "b", "Q": "d", "x": {"y": "c"}}])
    columns = ExampleColumns(prompt=prompt, completion=prompt.lower())
    message = r"rows\.json: the column '.*' cannot be both prompt and completion"
    with pytest.raises(UserError, match=message):
        ExampleReader(chatting, 100, columns=columns).read([path], 0.0)


def test_long_rows_are_left_out_or_cut(tmp_path, base):
    rows = [{"prompt": "a" * n, "completion": "b" * m} for n, m in ((3, 3), (3, 9), (8, 3), (7, 3))]
    path = write_rows(tmp_path / "rows.json", rows)
    found = ExampleReader(base, 8).read([path], 0.0)
    assert [shown(base, one)[0] for one in found.train] == ["<bos>aaabbb<eos>"]
    assert str(found) == (
        "examples: 1 to learn from; left out: 3 longer than 8 tokens (a limit of 14 keeps 99 %)"
    )
    found = ExampleReader(base, 14, option="--max_length").read([path], 0.0)
    assert str(found) == "examples: 4 to learn from; left out: 0 longer than 14 tokens"
    found = ExampleReader(base, 9, is_truncated=True).read([path], 0.0)
    assert [shown(base, one) for one in found.train] == [
        ("<bos>aaabbb<eos>", "bbb<eos>"),
        ("<bos>aaabbbbb", "bbbbb"),
        ("<bos>aaaaaaab", "b"),
    ]
    assert str(found) == (
        "examples: 3 to learn from; cut: 3 longer than 9 tokens; left out: 1 cut before what is learned"
    )


def test_what_is_held_out_depends_on_the_prompt_alone(tmp_path, base):
    rows = [{"prompt": f"{i}", "completion": f"{j}"} for i in range(40) for j in range(2)]
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    write_lines(one, *rows)
    write_lines(other, *reversed(rows))
    reader = ExampleReader(base, 20)
    found, again = reader.read([one], 0.3), reader.read([other], 0.3)

    def texts(examples: Sequence[Example]) -> list[str]:
        return sorted(base.decode(example.tokens.tolist()) for example in examples)

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


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"prompt": "a", "answer": "b"},
            "has the columns prompt, answer.*: expected prompt and comp",
        ),
        ({"prompt": "a", "completion": 7}, "row 2, field 'completion', is 7: expected text"),
        ({"prompt": " ", "completion": "b"}, "row 2, field 'prompt'.*text that is not empty"),
        ({"prompt": "a"}, "row 2, has no field 'completion', which other rows have"),
        (
            {"prompt": "a", "completion": [user("b")]},
            "'completion'.* a first message of the assist",
        ),
        ({"prompt": [assistant("a")], "completion": "b"}, "'prompt'.* that the assistant answers"),
        ({"prompt": [], "completion": "b"}, "row 2, field 'prompt'.*chat messages"),
        ({"prompt": "a\ud800", "completion": "b"}, "expected whole characters"),
        (
            {"messages": [user("a")]},
            "row 2, field 'messages'.*at least one message of the assistant",
        ),
        ({"messages": "a"}, "row 2, field 'messages', is 'a'.*a list of chat messages"),
        ({"messages": [{"role": "user"}]}, "row 2.*each with text in role and content"),
        ({"text": None}, "row 2, field 'text', is None.*text that is not empty"),
    ],
)
def test_a_row_that_cannot_be_is_one_sentence(tmp_path: Path, chatting, row, words):
    kinds = {"messages": [user("a"), assistant("b")]}, {"text": "a"}
    sound = next((x for x in kinds if row.keys() <= x.keys()), {"prompt": "a", "completion": "b"})
    rows = [row, row] if "answer" in row else [sound, row]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(UserError, match=words) as caught:
        ExampleReader(chatting, 100).read([path], 0.0)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and message.endswith(".")


def test_a_chat_without_a_template_names_the_row(tmp_path: Path, base):
    path = write_lines(tmp_path / "rows.jsonl", {"messages": [user("a"), assistant("b")]})
    with pytest.raises(UserError, match=r"line 1, field 'messages', is a chat, but .* has no chat"):
        ExampleReader(base, 100).read([path], 0.0)


def test_a_template_that_fails_names_the_row(tmp_path: Path):
    directory = write_tokenizer(tmp_path, eos_token="<eos>", chat_template="{{ 1 / 0 }}")
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    with pytest.raises(UserError, match=r"line 1, field 'completion': the chat template fails"):
        ExampleReader(HuggingFaceTokenizer(directory), 100).read([path], 0.0)
