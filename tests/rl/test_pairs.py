"""Preference pairs: the forms that files have, which tokens a loss reads, and rows that are refused."""

from pathlib import Path

import numpy as np
import pytest
from row_writing import write_lines
from runs import CHAT_TEMPLATE
from tokenizer_files import BOS, write_tokenizer

from pat_jax.common.errors import UserError
from pat_jax.rl.data.example_reader import PairReader, PairSplits
from pat_jax.rl.data.examples import Pair
from pat_jax.rl.data.schemas import PairSchema
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

EOS = 0
USER = {"role": "user", "content": "2+2?"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("4", "5"))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> HuggingFaceTokenizer:
    folder = tmp_path_factory.mktemp("chatty")
    tokens = {"eos_token": "<eos>", "bos_token": "<bos>", "chat_template": CHAT_TEMPLATE}
    return HuggingFaceTokenizer(write_tokenizer(folder, **tokens))


def write(folder: Path, *rows: dict) -> Path:
    return write_lines(folder / "pairs.jsonl", *rows)


def read(
    path: Path, tokenizer: HuggingFaceTokenizer, *, is_scored: bool, most: int = 64
) -> list[Pair]:
    return PairReader(tokenizer, most, is_scored).read([path], 0.0).train


def learned(tokenizer: HuggingFaceTokenizer, pair: Pair) -> tuple[str, str]:
    """The texts whose tokens are in the loss, without the end of the sequence."""
    both = ((each.tokens[each.in_loss]).tolist() for each in (pair.chosen, pair.rejected))
    one, other = (tokenizer.decode(tokens) for tokens in both)
    return one, other


TEXT_FORMS = [
    {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
    {"chosen": "2+2=4", "rejected": "2+2=5"},
]
CHAT_FORMS = [
    {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    {"prompt": "2+2?", "chosen": [FOUR], "rejected": [FIVE]},
    {"prompt": "2+2?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
    {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]},
    {"prompt": [USER], "chosen": "4", "rejected": "5"},
    {"chosen": [USER, FOUR], "rejected": [USER, FIVE]},
]


@pytest.mark.parametrize("row", TEXT_FORMS)
def test_texts_are_prompt_response_and_end(plain, tmp_path, row):
    (scored,) = read(write(tmp_path, row), plain, is_scored=True)
    for example, text in ((scored.chosen, "2+2=4"), (scored.rejected, "2+2=5")):
        assert example.tokens.tolist() == [BOS, *plain.encode(text), EOS]
        assert np.flatnonzero(example.in_loss).tolist() == [len(example) - 1]
    (generated,) = read(write(tmp_path, row), plain, is_scored=False)
    assert learned(plain, generated) == ("4", "5")
    assert generated.chosen.tokens.tolist() == scored.chosen.tokens.tolist()
    assert generated.chosen.in_loss[-1]


@pytest.mark.parametrize("row", CHAT_FORMS)
def test_chats_are_what_the_template_writes(chatty, tmp_path, row):
    (scored,) = read(write(tmp_path, row), chatty, is_scored=True)
    expected = chatty.encode_chat("<im>user:2+2?<im>assistant:4")
    assert scored.chosen.tokens.tolist() == expected
    assert np.flatnonzero(scored.chosen.in_loss).tolist() == [len(expected) - 1]
    (generated,) = read(write(tmp_path, row), chatty, is_scored=False)
    assert learned(chatty, generated) == ("4", "5")
    assert generated.chosen.tokens.tolist() == [*expected, EOS]


def test_texts_without_a_prompt_are_no_chats(chatty, tmp_path):
    """A part of a text is no user's message."""
    (pair,) = read(write(tmp_path, TEXT_FORMS[1]), chatty, is_scored=True)
    assert pair.chosen.tokens.tolist() == [BOS, *chatty.encode("2+2=4"), EOS]


def test_the_turns_behind_what_two_chats_share_are_generated(chatty, tmp_path):
    later = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    row = {"chosen": [USER, FOUR, *later], "rejected": [USER, FIVE, *later]}
    (pair,) = read(write(tmp_path, row), chatty, is_scored=False)
    one, other = learned(chatty, pair)
    assert one.startswith("4") and one.endswith("yes") and "sure" not in one
    assert other.startswith("5") and other.endswith("yes")


def test_a_score_is_read_before_padding(plain, tmp_path):
    """As transformers reads it: a model whose padding is its end token never sees the end."""
    path = write(tmp_path, TEXT_FORMS[0])
    (pair,) = PairReader(plain, 64, True, pad_id=EOS).read([path], 0.0).train
    assert pair.chosen.tokens.tolist() == [BOS, *plain.encode("2+2=4")]
    assert np.flatnonzero(pair.chosen.in_loss).tolist() == [len(pair.chosen) - 1]


def test_margins_subsets_and_named_columns(plain, tmp_path):
    rows = [
        {"q": {"text": "a"}, "better": "b", "worse": "c", "by": 2, "subset": "easy"},
        {"q": {"text": "d"}, "better": "e", "worse": "f", "by": -0.5, "subset": "hard"},
    ]
    names = PairSchema("q.text", "better", "worse", "by")
    found = PairReader(plain, 9, True, names).read([write(tmp_path, *rows)], 0.0).train
    assert [pair.margin for pair in found] == [2.0, -0.5]
    assert [pair.subset for pair in found] == ["easy", "hard"]
    assert len(found[0]) == 8


def test_long_pairs_are_left_out_and_pairs_of_one_prompt_stay_together(plain, tmp_path):
    rows = [{"prompt": f"{i % 40}=", "chosen": "x" * i, "rejected": "y"} for i in range(1, 121)]
    found = PairReader(plain, 100, True, option="--max_length").read([write(tmp_path, *rows)], 0.4)
    assert isinstance(found, PairSplits) and min(map(int, filter(None, found.too_long))) == 101
    train, held = (
        {bytes(pair.rejected.tokens) for pair in x} for x in (found.train, found.heldout)
    )
    assert train and held and not train & held
    words = f"pairs: {len(found.train)} to learn from, {len(found.heldout)} held out; left out: "
    assert str(found).startswith(
        f"{words}{len(found.too_long)} with more than 100 tokens in a text"
    )
    assert "(--max_length " in str(found)


def test_pairs_that_the_template_makes_equal_are_refused(tmp_path):
    template = "{% for m in messages %}<im>{{ m.content | trim }}{% endfor %}"
    write_tokenizer(tmp_path, eos_token="<eos>", chat_template=template)
    path = write(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "b "})
    with pytest.raises(UserError, match=r"line 1, fields 'chosen' and 'rejected', are the same 4"):
        read(path, HuggingFaceTokenizer(tmp_path), is_scored=True)


def test_a_text_without_a_token_of_its_own_is_refused(plain, tmp_path):
    path = write(tmp_path, {"chosen": "a<eos>b", "rejected": "a<eos>"})
    with pytest.raises(UserError, match=r"line 1, fields .* one is the beginning of the other"):
        read(path, plain, is_scored=False)
    assert len(read(path, plain, is_scored=True)) == 1
