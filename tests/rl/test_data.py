from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_writing import write, write_lines

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.data.epochs import Cursor, Epochs
from pat_jax.rl.data.problems import Problems, ProblemSplits, load_problems
from pat_jax.rl.data.schemas import INSTRUCTION


class WordTokenizer:
    """One token a word."""

    vocab_size, pad_id, eos_ids, checksum = 1000, 0, (1,), 0

    def encode(self, text: str) -> list[int]:
        return [2 + len(word) for word in text.split()]

    def decode(self, tokens) -> str:
        return " ".join("x" * (token - 2) for token in tokens)

    def encode_prompt(self, prompt, variables=None) -> list[int]:
        parts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
        return [token for part in parts for token in self.encode(part)]


def load(*paths: Path, seed: int = 0, max_prompt_length: int = 10_000, **options) -> ProblemSplits:
    return load_problems(
        paths, WordTokenizer(), seed=seed, max_prompt_length=max_prompt_length, **options
    )


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(id=index, tokens=(index,), text=str(index), columns={}) for index in range(count)
    ]


def ids(batch: list[Prompt]) -> list[int]:
    return [prompt.id for prompt in batch]


# --- order: that of `Epochs`, see below ------------------------------------------------------


def test_a_changed_batch_size_goes_on_behind_what_has_been_drawn():
    source, cursor, seen = Problems(prompts(43), seed=1, name="some"), Cursor(), list[int]()
    for size in (9, 9, 5, 5, 5, 2):
        batch, cursor = source.draw(cursor, size)
        seen += ids(batch)
    assert len(set(seen)) == 35 and source.epochs(cursor) == pytest.approx(35 / 43)


def test_a_checksum_is_of_what_is_asked_and_what_rewards_are_told():
    def checksum(*rows: tuple[str, object]) -> int:
        found = [Prompt(i, (1, len(text)), text, {"answer": x}) for i, (text, x) in enumerate(rows)]
        return Problems(found, seed=0, name="").checksum

    known = checksum(("a", "1"), ("b", "2"))
    assert known == checksum(("a", "1"), ("b", "2"))
    others = {
        checksum(("a", "1")),
        checksum(("b", "2"), ("a", "1")),
        checksum(("a", "1"), ("b", "3")),
        checksum(("a", "1"), ("b", ["2", {"\ud800": None}])),
        checksum(("a", "1"), ("c", "2")),
        checksum(("a", "1"), ("b", "2"), ("c", "3")),
    }
    assert len(others) == 6 and known not in others


def test_repeated_prompts_are_counted_and_never_in_one_batch(tmp_path):
    rows = [{"prompt": f"problem {i % 12}", "answer": str(i)} for i in range(37)]
    splits = load(write_lines(tmp_path / "a.jsonl", *rows), heldout_share=0.0)
    assert str(splits).startswith(
        "problems: 37 to train on (25 repeat another's prompt); left out:"
    )
    cursor, seen = Cursor(), list[str]()
    for _ in range(12):
        batch, cursor = splits.train.draw(cursor, 9)
        assert len({prompt.text for prompt in batch}) == 9
        seen += [str(prompt.columns["answer"]) for prompt in batch]
    assert set(seen) == {str(i) for i in range(37)}  # each row has its turn
    assert len({prompt.text for prompt in splits.train.draw(Cursor(), 20)[0]}) == 12
    chats = [[{"role": role, "content": "a"}] for role in ("user", "system")]
    path = write_lines(tmp_path / "b.jsonl", *({"prompt": chat, "tools": []} for chat in chats))
    assert "repeat" in str(load(path, heldout_share=0.0))  # the same text and the same tokens


# --- splits ----------------------------------------------------------------------------------


def test_the_split_is_a_property_of_the_text(tmp_path):
    rows = [{"prompt": f"problem {number}"} for number in range(400)]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    backwards = write_lines(tmp_path / "b.jsonl", *reversed(rows))
    first, second, reordered = load(path), load(path, seed=7), load(backwards)
    texts = [{p.text for p in split.heldout} for split in (first, second, reordered)]
    assert texts[0] == texts[1] == texts[2]
    assert not texts[0] & {p.text for p in first.train}
    assert len(first.train) + len(first.heldout) == 400
    assert 20 <= len(first.heldout) <= 60
    assert first.heldout.first(8) == second.heldout.first(8)
    assert first.train.first(8) != second.train.first(8)


# --- files -----------------------------------------------------------------------------------


def test_ids_are_line_numbers_whatever_is_left_out(tmp_path):
    text = '\ufeff{"prompt": "one"}\n\n{"prompt": "a far too long one"}\n{"prompt": "two\u2028"}'
    path = write(tmp_path / "a.jsonl", text)
    splits = load(path, max_prompt_length=2, heldout_share=0.0)
    assert {prompt.id: prompt.text for prompt in splits.train} == {1: "one", 4: "two\u2028"}
    assert len(splits.read.too_long) == 1
    assert "1 longer than 2 tokens" in str(splits)


@pytest.mark.parametrize(
    ("lengths", "limit"),
    [
        ([1] * 90 + list(range(2, 12)), 10),  # the 99th of 100
        ([1] * 198 + [7, 5], None),  # 1 % is left out, not more
        ([1] * 197 + [7, 5, 6], 5),
        ([1, 3], 3),
        ([3] * 200 + [300] * 2, 3),  # these are not counted, and may be left out
        ([3] * 199 + [300] * 3, None),  # nor these: the number is not known
    ],
)
def test_the_limit_that_would_keep_nearly_all_is_named(tmp_path, lengths, limit):
    rows = ({"prompt": " ".join(["ab"] * length)} for length in lengths)
    path = write_lines(tmp_path / "a.jsonl", *rows)
    splits = load(path, max_prompt_length=1, option="--longest")
    hint = f" (--longest {limit} keeps 99 %)" if limit else ""
    assert str(splits).endswith(f" longer than 1 tokens{hint}")
    if limit:
        kept = load(path, max_prompt_length=limit)
        assert len(kept.read.too_long) <= len(lengths) / 100
        assert len(load(path, max_prompt_length=limit - 1).read.too_long) > len(lengths) / 100


def test_ids_count_on_from_file_to_file(tmp_path):
    problems = [{"problem": "1 + 1?", "answer": "2"}, {"problem": "c", "answer": None}]
    one = write(tmp_path / "1.json", problems)
    other = write_lines(tmp_path / "2.jsonl", {"prompt": "a"}, {"prompt": "b"})
    splits = load(one, other, heldout_share=0.0)
    assert {prompt.id: prompt.text for prompt in splits.train} == {
        1: f"1 + 1?\n{INSTRUCTION}",
        3: "a",
        4: "b",
    }
    assert splits.read.report.without_answer == [f"{one}, row 2, field 'answer'"]
    with pytest.raises(UserError, match=r"1\.json and 1 more \(training split\) has 3 prompts"):
        splits.train.draw(Cursor(), 4)


def test_a_text_that_is_surely_too_long_is_not_tokenized(tmp_path):
    class Refusing(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            assert len(text) < 10_000
            return super().encode(text)

    path = write_lines(tmp_path / "a.jsonl", {"prompt": "x" * 10**6}, {"prompt": "y"})
    splits = load_problems([path], Refusing(), seed=0, max_prompt_length=9, heldout_share=0.0)
    assert [prompt.id for prompt in splits.train] == [2] and len(splits.read.too_long) == 1


# --- which rows a batch has: each once an epoch, none beside one that is alike --------------------

keys = st.lists(st.integers(0, 12), min_size=1, max_size=40)
seeds = st.integers(0, 2**32 - 1)


@given(st.data(), keys, seeds)
def test_a_batch_has_no_two_rows_alike_unless_it_must(data, alike, seed: int):
    epochs, cursor = Epochs(alike, seed=seed), Cursor()
    drawn: Counter[tuple[int, int]] = Counter()
    for size in data.draw(st.lists(st.integers(1, len(alike)), min_size=1, max_size=12)):
        rows, after = epochs.draw(cursor, size)
        assert (rows, after) == Epochs(alike, seed=seed).draw(cursor, size)  # a pure function
        assert len(rows) == size == len(set(rows))
        if size <= len(set(alike)):
            assert len({alike[row] for row in rows}) == size
        drawn.update((after.epoch, row) for row in rows)
        cursor = after
    assert max(drawn.values()) == 1  # no row twice in an epoch


@given(st.data(), st.integers(1, 60), seeds)
def test_where_none_are_alike_an_epoch_has_every_row_once_however_it_is_cut(data, count, seed):
    epochs, cursor, seen = Epochs(range(count), seed=seed), Cursor(), list[int]()
    while len(seen) < count:
        size = data.draw(st.integers(1, count - len(seen)))
        rows, cursor = epochs.draw(cursor, size)
        seen += rows
    assert sorted(seen) == list(range(count))
    assert seen == np.random.default_rng((seed, 0)).permutation(count).tolist()
    assert epochs.draw(cursor, 1)[1] == Cursor(1, 1)


@given(st.integers(1, 8), st.integers(2, 30), st.integers(2, 6), seeds)
def test_rows_that_are_alike_are_spread_over_the_epoch(size, different, copies, seed):
    size = min(size, different)
    epochs, cursor, drawn = Epochs([*range(different)] * copies, seed=seed), Cursor(), Counter()
    for _ in range(different * copies // size):
        rows, cursor = epochs.draw(cursor, size)
        drawn.update(row % different for row in rows)
    assert cursor.epoch == 0  # nothing is passed over where it need not be
    assert max(drawn.values()) - min(drawn.values()) <= 1 + (size - 1 > 0)


def test_what_an_epoch_passes_over_comes_in_another():
    alike = [*range(9), "twice", "twice", "twice"]
    epochs, cursor, seen = Epochs(alike, seed=3), Cursor(), Counter()
    for _ in range(60):
        rows, cursor = epochs.draw(cursor, 10)
        seen.update(rows)
    assert set(seen) == set(range(12)) and all(seen[row] == 60 for row in range(9))
    assert all(seen[row] > 5 for row in range(9, 12))


def test_a_cursor_behind_the_end_begins_the_next_epoch():
    assert Epochs("abc", seed=0).draw(Cursor(2, 50), 2)[1] == Cursor(3, 2)
