"""Rows and files that are refused, in all readers: one sentence with file, row and field."""

import json
from pathlib import Path

import pytest
from row_readers import ANSWERS, READERS, assistant, read, user
from row_writing import rows_of, write, write_lines
from tokenizer_files import write_tokenizer

from pat_jax.common.errors import UserError
from pat_jax.rl.data.example_reader import PairReader
from pat_jax.rl.data.rows import Schema
from pat_jax.rl.data.schemas import ExampleSchema, PairSchema, ProblemSchema
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

PROBLEM = {"problem": "1 + 1?", "answer": "2"}
QUESTION = {"question": "Half of 4000?", "answer": "4000 / 2 = 2000\n#### 2,000"}
EXAMPLE = {"prompt": "a", "completion": "b"}
CHAT = {"messages": [user("a"), assistant("b")]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
FOUR, FIVE = assistant("4"), assistant("5")

REFUSED = {
    "train": [
        ([{"text": "a"}], r"a\.json has the columns text: expected one of prompt, problem"),
        ([{}], r"a\.json has the columns none: expected one of prompt"),
        ([PROBLEM, {"problem": "a"}], r"row 2, has no field 'answer', which other rows have"),
        ([PROBLEM, {"prompt": "a"}], "row 1, has no field 'prompt', which other rows have"),
        ([{**PROBLEM, "problem": None}], "row 1, field 'problem', is None: expected text"),
        ([{"prompt": ""}], "row 1, field 'prompt', is '': expected text that is not empty"),
        ([{"prompt": []}], r"row 1, field 'prompt', is \[\]: expected chat messages"),
        ([{"prompt": [{"role": "user"}]}], "row 1, field 'prompt', .* role and content"),
        ([{"prompt": "a\ud800"}], "row 1, field 'prompt', .* expected whole characters"),
        ([{"prompt": [{"role": "\ud800", "content": "a"}]}], "row 1, .* whole characters"),
        ([{"prompt": [{"role": "a", "content": "a", "x": ["\udfff"]}]}], "row 1, .* whole char"),
        ([{"prompt": "a", "completions": 1}], "row 1, has a field 'completions'"),
        ([QUESTION, {**QUESTION, "answer": "18"}], "row 2, field 'answer', is '18': .* '#### '"),
        ([{**QUESTION, "answer": "so ####  "}], "row 1, field 'answer', .* '#### '"),
    ],
    "sft": [
        ([{"prompt": "a", "answer": "b"}], "columns prompt, answer: expected prompt and comp"),
        ([EXAMPLE, {**EXAMPLE, "completion": 7}], "row 2, field 'completion', is 7: expected text"),
        ([EXAMPLE, {**EXAMPLE, "prompt": " "}], "row 2, field 'prompt'.*text that is not empty"),
        ([EXAMPLE, {"prompt": "a"}], "row 2, has no field 'completion', which other rows have"),
        ([EXAMPLE, {**EXAMPLE, "completion": [user("b")]}], "row 2, .* a first message of the as"),
        (
            [EXAMPLE, {**EXAMPLE, "prompt": [assistant("a")]}],
            "row 2, .* that the assistant answers",
        ),
        ([EXAMPLE, {**EXAMPLE, "prompt": []}], "row 2, field 'prompt'.*chat messages"),
        ([EXAMPLE, {**EXAMPLE, "prompt": "a\ud800"}], "expected whole characters"),
        ([CHAT, {"messages": [user("a")]}], "row 2, field 'messages'.*one message of the assist"),
        ([CHAT, {"messages": "a"}], "row 2, field 'messages', is 'a'.*a list of chat messages"),
        ([CHAT, {"messages": [{"role": "user"}]}], "row 2.*each with text in role and content"),
        ([{"text": "a"}, {"text": None}], "row 2, field 'text', is None.*text that is not empty"),
    ],
    "reward_model": [
        ([EXAMPLE], "prompt, completion: expected chosen and rejected"),
        ([PAIR, {"prompt": "a", "chosen": "b"}], "row 2, has no field 'rejected'"),
        ([PAIR, {**PAIR, "rejected": None}], "row 2, field 'rejected', is None: .*that is not em"),
        ([PAIR, {**PAIR, "rejected": " "}], "row 2, field 'rejected', is ' ': .*that is not empty"),
        ([PAIR, {**PAIR, "chosen": 3}], "row 2, field 'chosen', is 3.* or a list of chat messages"),
        ([PAIR, {**PAIR, "rejected": "b"}], "row 2, field 'rejected', is 'b'.*nothing is learned"),
        ([PAIR, {**PAIR, "rejected": []}], r"row 2, field 'rejected', is \[\].*chat messages"),
        ([PAIR, {**PAIR, "rejected": [FIVE]}], "row 2, field 'rejected'.* of one kind"),
        ([PAIR, {**PAIR, "prompt": ""}], "row 2, field 'prompt', is ''"),
        ([PAIR, {**PAIR, "chosen": "x\ud800"}], "row 2, field 'chosen'.* half of one"),
        ([PAIR, {**PAIR, "image": "x.png"}], "row 2, field 'image'.* reads text alone"),
        ([PAIR, {**PAIR, "margin": 1}], "row 1, has no field 'margin', which other rows have"),
        (
            [{"prompt": [user("a")], "chosen": [user("a"), FOUR], "rejected": [user("a")]}],
            "row 1, field 'rejected'.* a last message of the assistant",
        ),
        ([PAIR, {**PAIR, "prompt": [user("a"), FOUR]}], "row 2, field 'prompt'.* not one of its"),
        *(
            ([{**PAIR, "margin": 1}, {**PAIR, "margin": value}], "row 2, field 'margin', is ")
            for value in ("1", True, None, 1e999, 10**400, -(10**400), 1e300, float("nan"))
        ),
    ],
}
CASES = [(reader, *case) for reader, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("reader", "rows", "words"), CASES)
def test_bad_rows_say_what_and_where(chatty, tmp_path, reader, rows, words):
    path = write(tmp_path / "a.json", rows)
    with pytest.raises(UserError, match=words) as caught:
        read(chatty, path, reader)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and message.endswith(".")


TWO_USES = [
    *(ProblemSchema(*names) for names in (("q", "q"), ("a.b", "a.b"), ("p", "P"), ("", "prompt"))),
    *(ExampleSchema(prompt=name, completion=name.lower()) for name in ("q", "P", "a.b")),
    PairSchema(prompt="chosen"),
    PairSchema(prompt="rejected"),
    PairSchema(chosen="rejected"),
    PairSchema(chosen="prompt"),
    PairSchema(margin="chosen"),
    PairSchema("a.b", "a.b", "rejected"),
]


@pytest.mark.parametrize("schema", TWO_USES, ids=repr)
def test_no_column_is_two(tmp_path: Path, schema: Schema):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1, "a": {"b": "d"}}
    path = write_lines(tmp_path / "a.jsonl", row | {"q": "1", "P": "2"})
    with pytest.raises(UserError, match=r"a\.jsonl: the column '.*' cannot be both .*_key\.$"):
        rows_of(path, schema)


NAMED = [
    (ProblemSchema("q.fr"), "data.prompt_key is 'q.fr'"),
    (ProblemSchema("", "b"), "data.answer_key is 'b'"),
    (ExampleSchema(completion="b"), "data.completion_key is 'b'"),
    (PairSchema(chosen="better"), "data.chosen_key is 'better'"),
]


@pytest.mark.parametrize(("schema", "words"), NAMED)
def test_a_named_column_that_no_row_has(tmp_path, schema: Schema, words: str):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a", "q": {"en": "b"}})
    expected = rf"--{words}: .*a\.jsonl has the columns prompt, q; .* or column\.field"
    with pytest.raises(UserError, match=expected):
        rows_of(path, schema)


FIELDS = {"train": "field 'prompt'", "sft": "field 'completion'"}


@pytest.mark.parametrize("reader", READERS)
def test_a_template_that_fails_names_the_row(tmp_path: Path, reader: str):
    directory = write_tokenizer(tmp_path, eos_token="<eos>", chat_template="{{ 1 / 0 }}")
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a"} | ANSWERS[reader])
    fields = FIELDS.get(reader, "fields 'chosen' and 'rejected'")
    with pytest.raises(UserError, match=rf"a\.jsonl, line 1, {fields}: the chat template fails"):
        read(HuggingFaceTokenizer(directory), path, reader)


@pytest.mark.parametrize("reader", ["sft", "dpo", "reward_model"])
def test_a_chat_without_a_template_names_the_row(plain, tmp_path: Path, reader: str):
    chats = {"completion": [FOUR], "chosen": [FOUR], "rejected": [FIVE]}
    row = {"prompt": "a"} | {name: chats[name] for name in ANSWERS[reader]}
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a"} | ANSWERS[reader], row)
    with pytest.raises(UserError, match=r"line 2, .*is a chat, but .* has no chat template"):
        read(plain, path, reader)


# --- rows that are left out ------------------------------------------------------------------

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


def test_a_margin_that_is_no_number_is_a_bad_row(chatty, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", PAIR | {"margin": 10**400}, PAIR | {"margin": 2})
    (pair,) = PairReader(chatty, 99, True, bad_rows="skip").read([path], 0.0).train
    assert pair.margin == 2.0
