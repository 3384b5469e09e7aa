"""The columns that a prompt is made of reach the model, in all readers; what does not is counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from row_writing import write_lines
from tokenizer_files import write_tokenizer

from pat_jax.common.errors import UserError
from pat_jax.rl.data.examples import ExampleReader
from pat_jax.rl.data.pair_files import PairColumns
from pat_jax.rl.data.pairs import PairReader
from pat_jax.rl.data.problem_files import Columns
from pat_jax.rl.data.problems import load_problems
from pat_jax.rl.text.tokenizer import ChatMessage, HuggingFaceTokenizer

CHATML = (
    "{% for m in messages %}<im>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant:{% endif %}"
)
READERS = ("train", "sft", "dpo", "reward_model")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> HuggingFaceTokenizer:
    folder = tmp_path_factory.mktemp("chatty")
    return HuggingFaceTokenizer(write_tokenizer(folder, eos_token="<eos>", chat_template=CHATML))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(write_tokenizer(tmp_path_factory.mktemp("p"), eos_token="<eos>"))


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def assistant(text: str, **keys: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **keys}


def system(text: str) -> ChatMessage:
    return {"role": "system", "content": text}


ANSWERS = {
    "train": {"answer": "4"},
    "sft": {"completion": "4"},
    "dpo": {"chosen": "4", "rejected": "5"},
    "reward_model": {"chosen": "4", "rejected": "5"},
}


def read(
    tokenizer: HuggingFaceTokenizer, path: Path, reader: str, *, key: str = "", bad_rows: Any = ""
) -> tuple[list[str], str]:
    """What the model reads, the special tokens included, and what is told."""
    if reader == "train":
        options = {"seed": 0, "max_prompt_length": 999, "heldout_share": 0.0, "bad_rows": bad_rows}
        found = load_problems([path], tokenizer, columns=Columns(key), **options)
        tokens = [prompt.tokens for prompt in found.train.first(9)]
    elif reader == "sft":
        found = ExampleReader(tokenizer, 999, bad_rows=bad_rows).read([path], 0.0)
        tokens = [one.tokens for one in found.train]
    else:
        columns, is_scored = PairColumns(key), reader == "reward_model"
        pairs = PairReader(tokenizer, 999, is_scored, columns, bad_rows=bad_rows)
        found = pairs.read([path], 0.0)
        tokens = [pair.chosen.tokens for pair in found.train]
    return [tokenizer._tokenizer.decode([int(x) for x in each]) for each in tokens], str(found)


def learned(tokenizer: HuggingFaceTokenizer, example) -> str:
    return tokenizer._tokenizer.decode(example.tokens[example.in_loss].tolist())


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"system": "Count.", "prompt": "2+2?"}, [system("Count."), user("2+2?")]),
        ({"system_prompt": "Count.", "prompt": [user("2+2?")]}, [system("Count."), user("2+2?")]),
        ({"System": "No.", "prompt": [system("Yes."), user("?")]}, [system("Yes."), user("?")]),
        ({"system": None, "query": "2+2?"}, [user("2+2?")]),
        ({"instruction": "Add.", "input": "2 2"}, [user("Add.\n2 2")]),
        ({"instruction": "Add.", "input": ""}, [user("Add.")]),
        ({"input": "2+2?"}, [user("2+2?")]),
        ({"context": "Two twos.", "instruction": "Add."}, [user("Two twos.\n\nAdd.")]),
        ({"passage": "Two twos.", "query": "Sum?"}, [user("Two twos.\n\nSum?")]),
        ({"prompt": json.dumps([user("2+2?")])}, [user("2+2?")]),
        ({"prompt": "[1, 2]"}, [user("[1, 2]")]),
        ({"prompt": {"role": ["user"], "content": ["2+2?"]}}, [user("2+2?")]),
    ],
)
def test_what_belongs_to_a_prompt_is_read(chatty, tmp_path, reader, row, prompt):
    path = write_lines(tmp_path / "a.jsonl", row | ANSWERS[reader])
    (text,), told = read(chatty, path, reader)
    assert text.startswith(chatty.chat_text(prompt))
    assert ("System (1 rows)" in told) == ("System" in row)


@pytest.mark.parametrize("reader", READERS)
def test_what_nobody_reads_is_counted_once(chatty, tmp_path, reader):
    rows = [
        {"question": "Which?", "choices": choices, "history": [["a", "b"]]} | ANSWERS[reader]
        for choices in (["x", "y"], ["z"], [])
    ]
    told = read(chatty, write_lines(tmp_path / "a.jsonl", *rows), reader)[1]
    assert "choices (2 rows)" in told and "history (3 rows)" in told and "question" not in told


@pytest.mark.parametrize("reader", ["train", "dpo", "reward_model"])
def test_a_named_column_wins(chatty, tmp_path, reader):
    row = {"prompt": "No?", "ask": "Yes?", "system": "Count."} | ANSWERS[reader]
    (text,), told = read(chatty, write_lines(tmp_path / "a.jsonl", row), reader, key="ask")
    assert "Yes?" in text and "No?" not in text and "Count." in text and "prompt (1 rows)" in told


def test_without_a_template_the_texts_follow_each_other(plain, tmp_path):
    for reader in READERS:
        row = {"system": "Count.", "prompt": "2+2="} | ANSWERS[reader]
        (text,), _ = read(plain, write_lines(tmp_path / "a.jsonl", row), reader)
        assert text.removeprefix("<bos>").startswith("Count.\n\n2+2=")


@pytest.mark.parametrize("is_scored", [False, True])
@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "4", "rejected": "5"},
        {"chosen": "4", "rejected": "45", "ask": "2+2?"},
        {"chosen": [user("a"), assistant("x")], "rejected": [user("b"), assistant("y")]},
        {
            "chosen": [system("s"), user("a"), assistant("x")],
            "rejected": [system("s"), user("b"), assistant("y")],
        },
        {"chosen": [assistant("x")], "rejected": [assistant("y")]},
    ],
)
def test_pairs_without_one_prompt_are_no_pairs(chatty, tmp_path, row, is_scored):
    path = write_lines(tmp_path / "a.jsonl", row)
    with pytest.raises(UserError, match=r"line 1, .*--data\.prompt_key"):
        PairReader(chatty, 99, is_scored).read([path], 0.0)


@pytest.mark.parametrize("start", ["", "\n "])
def test_a_prompt_in_front_of_all_responses_is_taken_off(chatty, tmp_path, start):
    prompt = "Human: hi\n\nAssistant:"
    rows = [
        {"prompt": prompt, "chosen": f"{start}{prompt} a", "rejected": f"{start}{prompt} b"},
        {"prompt": "2", "chosen": "2 is even", "rejected": "Two is odd"},  # an answer of its own
    ]
    found = PairReader(chatty, 99, False).read([write_lines(tmp_path / "a.jsonl", *rows)], 0.0)
    one, other = found.train
    assert [learned(chatty, x) for x in (one.chosen, one.rejected)] == [" a<eos>", " b<eos>"]
    assert learned(chatty, other.chosen) == "2 is even<eos>" and "in 1 rows" in str(found)


def test_a_prompt_beside_whole_chats_is_their_beginning(chatty, tmp_path):
    chats = {
        name: [user("hi"), assistant(text)] for name, text in (("chosen", "a"), ("rejected", "b"))
    }
    rows = [
        {"prompt": [system("Brief."), user("hi")], **chats},
        {"prompt": "hi", "system": "Brief.", **chats},
        {"prompt": "another question", **chats},
    ]
    found = PairReader(chatty, 99, False).read([write_lines(tmp_path / "a.jsonl", *rows)], 0.0)
    texts = [chatty._tokenizer.decode(pair.chosen.tokens.tolist()) for pair in found.train]
    asked = chatty.chat_text([system("Brief."), user("hi")])
    assert [text.startswith(asked) for text in texts] == [True, True, False]
    assert "prompt (1 rows)" in str(found)


# --- keys of messages ------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{"weight": 0}, {"train": False}, {"training": 0}, {"loss": 0.0}])
@pytest.mark.parametrize("only", [True, False])
def test_a_turn_that_is_not_to_be_learned_is_not(chatty, tmp_path, keys, only):
    chat = [user("a"), assistant("one", **keys), user("b"), assistant("two", weight=1)]
    path = write_lines(tmp_path / "a.jsonl", {"messages": chat})
    (example,) = ExampleReader(chatty, 99, assistant_only=only).read([path], 0.0).train
    assert "one" not in learned(chatty, example) and "two<eos>" in learned(chatty, example)
    assert (learned(chatty, example) == "two<eos>") == only


@pytest.mark.parametrize("value", [0.5, "no", 10**400, [1]])
def test_other_weights_and_no_turn_to_learn_are_refused(chatty, tmp_path, value):
    for weight in (value, 0):
        rows = {"messages": [user("a"), assistant("one", weight=weight)]}
        with pytest.raises(UserError, match=r"line 1, .*expected"):
            ExampleReader(chatty, 99).read([write_lines(tmp_path / "a.jsonl", rows)], 0.0)


def test_keys_that_the_template_does_not_write_are_counted(chatty, tmp_path):
    call = [{"function": {"name": "f", "arguments": {}}}]
    chat = [{**user("a"), "name": "Ann"}, assistant("b", tool_calls=call)]
    path = write_lines(tmp_path / "a.jsonl", {"messages": chat}, {"messages": chat})
    told = str(ExampleReader(chatty, 99).read([path], 0.0))
    assert "name of messages (2 rows)" in told and "tool_calls of messages (2 rows)" in told
    chat[1] = {"role": "assistant", "content": None, "tool_calls": call}
    with pytest.raises(UserError, match="leaves out what the assistant says"):
        ExampleReader(chatty, 99).read([write_lines(path, {"messages": chat})], 0.0)


def test_keys_that_the_template_writes_are_read(tmp_path):
    template = CHATML.replace(
        "{{ m.role }}:",
        "{{ m.role }}{{ m.name }}{% if m.tool_calls %}{{ m.tool_calls }}{% endif %}:",
    )
    folder = write_tokenizer(tmp_path, eos_token="<eos>", chat_template=template)
    row = {"messages": [{**user("a"), "name": "Ann"}, assistant("b", tool_calls=[{"f": 1}])]}
    found = ExampleReader(HuggingFaceTokenizer(folder), 99).read(
        [write_lines(tmp_path / "a.jsonl", row)], 0.0
    )
    assert "of messages" not in str(found)


# --- rows that cannot be used ----------------------------------------------------------------

BAD = {
    "train": [{"prompt": "", "answer": "1"}, {"prompt": "a", "answer": [1]}, {"answer": "1"}],
    "sft": [{"prompt": "a", "completion": None}, {"prompt": None, "completion": "b"}],
    "dpo": [{"prompt": "a", "chosen": "b", "rejected": x} for x in ("b", "", None)],
    "reward_model": [{"prompt": "a", "chosen": "b", "rejected": x} for x in ("b", " ", 3)],
}


@pytest.mark.parametrize("reader", READERS)
def test_bad_rows_end_the_command_or_are_counted(chatty, tmp_path, reader):
    good, bad = {"prompt": "2+2?"} | ANSWERS[reader], BAD[reader]
    lines = [json.dumps(row) for row in (good, *bad, good)]
    path = tmp_path / "a.jsonl"
    path.write_bytes("\n".join([*lines, "{broken", "[1]", ""]).encode() + b"\xff\n")
    with pytest.raises(UserError, match=r"line \d, .*--data\.bad_rows skip"):
        read(chatty, path, reader, bad_rows="refuse")
    texts, told = read(chatty, path, reader, bad_rows="skip")
    assert len(texts) == 2 and f" {len(bad) + 3} (the first: {path}, line " in told


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e300, float("nan"), float("inf")])
def test_a_margin_that_no_number_of_the_model_can_be_is_a_bad_row(chatty, tmp_path, value):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = write_lines(tmp_path / "a.jsonl", row | {"margin": value}, row | {"margin": 2})
    with pytest.raises(UserError, match="line 1, field 'margin'"):
        PairReader(chatty, 99, True).read([path], 0.0)
    (pair,) = PairReader(chatty, 99, True, bad_rows="skip").read([path], 0.0).train
    assert pair.margin == 2.0
