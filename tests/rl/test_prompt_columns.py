"""The columns that a prompt is made of reach the model, in all readers; what does not is counted."""

import json

import pytest
from row_readers import ANSWERS, CHATML, READERS, assistant, read, system, user
from row_writing import rows_of, write_lines
from tokenizer_files import write_tokenizer

from pat_jax.common.errors import UserError
from pat_jax.rl.data.example_reader import ExampleReader, PairReader
from pat_jax.rl.data.schemas import ExampleSchema
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer


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
        {"question": "Which?", "choices": choices, "history": [["a", "b"]]}
        | {f"column{i}": 1 for i in range(20)}
        | ANSWERS[reader]
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


HH = "\n\nHuman: hi\n\nAssistant: "


@pytest.mark.parametrize("column", ["prompt", "question", "input", "instruction", "query"])
@pytest.mark.parametrize(
    "text", [HH, "### Instruction:\nhi\n\n### Response:\n", "[INST] hi [/INST]"]
)
def test_a_column_that_whole_texts_hold_is_a_copy(plain, chatty, tmp_path, column, text):
    row = {column: "hi", "chosen": f"{text}good", "rejected": f"{text}bad"}
    path = write_lines(tmp_path / "a.jsonl", row)
    for tokenizer in (plain, chatty):
        found = PairReader(tokenizer, 99, False).read([path], 0.0)
        assert tokenizer.decode(found.train[0].chosen.tokens.tolist()).count("hi") == 1
        assert learned(tokenizer, found.train[0].chosen) == "good<eos>"
        assert "in 1 rows" in str(found) and "not shown" not in str(found)


@pytest.mark.parametrize("value", [None, "", "a source"])
def test_a_guessed_column_beside_a_dialogue_is_no_prompt(plain, tmp_path, value):
    rows = [{"chosen": f"{HH}{x}", "rejected": f"{HH}z", "input": "src"} for x in "ab"]
    rows[0]["input"] = value
    found = PairReader(plain, 99, False).read([write_lines(tmp_path / "a.jsonl", *rows)], 0.0)
    assert [learned(plain, pair.chosen) for pair in found.train] == ["a<eos>", "b<eos>"]
    assert f"input ({2 if value else 1} rows)" in str(found) and "repeat" not in str(found)


def test_a_question_that_both_answers_quote_is_a_prompt(chatty, tmp_path):
    answer = "You ask whether 2+2? I say "
    row = {"question": "2+2?", "chosen": f"{answer}4", "rejected": f"{answer}5"}
    (text,), told = read(chatty, write_lines(tmp_path / "a.jsonl", row), "dpo")
    assert text == f"{chatty.chat_text([user('2+2?')])}{answer}4<eos>" and "repeat" not in told


def test_texts_without_spaces_may_begin_alike(plain, tmp_path):
    row = {"chosen": "写一首诗春天来了", "rejected": "写一首诗夏天来了"}
    (pair,) = PairReader(plain, 99, False).read([write_lines(tmp_path / "a.jsonl", row)], 0.0).train
    assert learned(plain, pair.chosen) == "春天来了<eos>"


@pytest.mark.parametrize("wrap", [str, lambda text: [assistant(text)]])
@pytest.mark.parametrize(
    ("prompt", "answer", "rest"),
    [
        ("Hi", "History is", ""),
        ("2", "24", ""),
        ("2", "2 is even", ""),
        ("A", "A good answer", ""),
        ("Hello!", "Hello! How are you?", ""),
        ("The capital of France", "The capital of Frances", ""),
        ("What is the sum?", "What is the sum? It is 4", " It is 4"),
        ("What is\nthe sum?", "What  is the sum? It is 4", " It is 4"),
        ("hi", "hi\n\nAssistant: good", "\n\nAssistant: good"),
        ("法国的首都是哪里？", "法国的首都是哪里？巴黎", "巴黎"),
    ],
)
def test_what_is_taken_off_is_plainly_the_prompt(chatty, tmp_path, prompt, answer, rest, wrap):
    rejected = f"{answer} not" if rest else "no"
    row = {"prompt": prompt, "chosen": wrap(answer), "rejected": wrap(rejected)}
    path = write_lines(tmp_path / "a.jsonl", row | {"completion": wrap(answer)})
    (pair,) = PairReader(chatty, 99, False).read([path], 0.0).train
    (example,) = ExampleReader(chatty, 99).read([path], 0.0).train
    for each in (pair.chosen, example):
        assert learned(chatty, each) == f"{rest or answer}<eos>"


def test_the_title_of_an_example_is_not_taken_off(chatty, tmp_path):
    row = {"prompt": "The capital of France", "completion": "The capital of France is Paris."}
    (one,) = ExampleReader(chatty, 99).read([write_lines(tmp_path / "a.jsonl", row)], 0.0).train
    assert learned(chatty, one) == "The capital of France is Paris.<eos>"


def test_text_that_is_json_of_messages_stays_text_as_an_answer(chatty, tmp_path):
    text = json.dumps([assistant("x")])
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "p", "completion": text})
    (example,) = ExampleReader(chatty, 999).read([path], 0.0).train
    assert learned(chatty, example) == f"{text}<eos>"
    text = json.dumps([user("x")])
    path = write_lines(path, {"prompt": "p", "chosen": '{"a": 1}', "rejected": text})
    (pair,) = PairReader(chatty, 999, False).read([path], 0.0).train
    assert learned(chatty, pair.rejected) == f"{text}<eos>"
    answers = {name: json.dumps([assistant(name)]) for name in ("chosen", "rejected", "completion")}
    path = write_lines(path, {"prompt": json.dumps([user("p")])} | answers)
    (pair,) = PairReader(chatty, 999, False).read([path], 0.0).train
    (example,) = ExampleReader(chatty, 999).read([path], 0.0).train
    texts = learned(chatty, pair.chosen), learned(chatty, example)
    assert texts == ("chosen<eos>", "completion<eos>")


@pytest.mark.parametrize("column", ["question", "instruction", "input"])
@pytest.mark.parametrize("other", [{"messages": [user("q"), assistant("m")]}, {"text": "m"}])
def test_messages_and_texts_come_before_a_guessed_prompt(chatty, tmp_path, column, other):
    rows = [{column: "a", "completion": completion} | other for completion in ("c", None)]
    found = ExampleReader(chatty, 99).read([write_lines(tmp_path / "a.jsonl", *rows)], 0.0)
    assert "m<eos>" in learned(chatty, found.train[0]) and "completion (1 rows)" in str(found)
    named = ExampleReader(chatty, 99, schema=ExampleSchema(completion="completion"))
    path = write_lines(tmp_path / "a.jsonl", rows[0])
    assert learned(chatty, named.read([path], 0.0).train[0]) == "c<eos>"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("prompt", ["2+2?", [user("2+2?")]])
def test_a_template_without_a_system_role_gets_its_text_before_the_user(tmp_path, reader, prompt):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no role') }}{% endif %}"
    folder = write_tokenizer(tmp_path, eos_token="<eos>", chat_template=refusing + CHATML)
    row = {"system": "Count.", "prompt": prompt} | ANSWERS[reader]
    tokenizer = HuggingFaceTokenizer(folder)
    (text,), _ = read(tokenizer, write_lines(tmp_path / "a.jsonl", row), reader)
    assert text.startswith("<im>user:Count.\n\n2+2?<eos><im>assistant:")


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
    assert "prompt (1 rows)" in str(found) and "repeat" not in str(found)


# --- keys of messages ------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{"weight": 0}, {"train": False}, {"training": 0}, {"loss": 0.0}])
@pytest.mark.parametrize("only", [True, False])
def test_a_turn_that_is_not_to_be_learned_is_not(chatty, tmp_path, keys, only):
    chat = [user("a"), assistant("one", **keys), user("b"), assistant("two", weight=1)]
    path = write_lines(tmp_path / "a.jsonl", {"messages": chat})
    (example,) = ExampleReader(chatty, 99, assistant_only=only).read([path], 0.0).train
    assert "one" not in learned(chatty, example) and "two<eos>" in learned(chatty, example)
    assert (learned(chatty, example) == "two<eos>") == only


@pytest.mark.parametrize(
    "keys", [{"weight": 0.5}, {"train": "no"}, {"weight": "1"}, {"weight": 10**400}, {"loss": 0.73}]
)
def test_other_values_are_keys_like_any_other(chatty, tmp_path, keys):
    row = {"messages": [user("a"), assistant("one", **keys)]}
    found = ExampleReader(chatty, 99).read([write_lines(tmp_path / "a.jsonl", row)], 0.0)
    assert learned(chatty, found.train[0]) == "one<eos>"
    assert f"{next(iter(keys))} of messages (1 rows)" in str(found)


def test_a_chat_without_a_turn_to_learn_is_left_out_and_counted(chatty, tmp_path):
    rows = [{"messages": [user("a"), assistant("one", weight=weight)]} for weight in (0, 1)]
    found = ExampleReader(chatty, 99).read([write_lines(tmp_path / "a.jsonl", *rows)], 0.0)
    assert len(found.train) == 1 and "1 with nothing to learn" in str(found)
    pair = {"chosen": [assistant("a", weight=0)], "rejected": [assistant("b")]}
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "x"} | pair)
    with pytest.raises(UserError, match=r"line 1, .*expected"):
        PairReader(chatty, 99, False).read([path], 0.0)


ARGUMENTS = {"a": None, "b": [None, {"c": None}]}
CALLS = [user("?"), {"role": "assistant", "content": None, "tool_calls": [{"f": ARGUMENTS}]}]


@pytest.mark.parametrize("messages", [CALLS, json.dumps(CALLS)])
def test_nulls_inside_a_message_stay_and_those_of_its_keys_go(tmp_path, messages):
    path = write_lines(tmp_path / "a.jsonl", {"messages": messages})
    (row,) = rows_of(path, ExampleSchema())
    call = {"role": "assistant", "content": "", "tool_calls": [{"f": ARGUMENTS}]}
    assert row.responses == [[user("?"), call]]


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
