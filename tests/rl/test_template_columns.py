"""What a row tells its chat template, and what no template can show."""

import json
from pathlib import Path
from typing import Any

import pytest
from row_writing import write_lines, write_rows
from tokenizer_files import write_tokenizer
from transformers import AutoTokenizer

from pat_jax.common.errors import UserError
from pat_jax.rl.data.example_reader import ExampleReader
from pat_jax.rl.data.problems import ProblemSplits, load_problems
from pat_jax.rl.data.schemas import ProblemSchema
from pat_jax.rl.text.tokenizer import Chat, HuggingFaceTokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<im>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant:{{ mood }}{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}}}
ASK = [{"role": "user", "content": "Rain?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    return write_tokenizer(folder, eos_token="<eos>", bos_token="<bos>", chat_template=TEMPLATE)


def problems(path: Path, tokenizer: HuggingFaceTokenizer, **options: Any) -> ProblemSplits:
    options |= {"seed": 0, "max_prompt_length": 999, "heldout_share": 0.0}
    return load_problems([path], tokenizer, **options)


def told(folder: Path, **variables: Any) -> tuple[int, ...]:
    """By transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        ASK, tokenize=False, add_generation_prompt=True, **variables
    )
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("columns", "variables"),
    [
        ({"tools": [WEATHER, CLOCK]}, {"tools": [WEATHER, CLOCK]}),
        ({"tools": json.dumps([CLOCK])}, {"tools": [CLOCK]}),
        ({"tools": [], "chat_template_kwargs": None}, {}),
        ({"tools": "", "chat_template_kwargs": {}}, {}),
        ({"chat_template_kwargs": {"mood": "wet"}}, {"mood": "wet"}),
        ({"chat_template_kwargs": '{"mood": "wet"}'}, {"mood": "wet"}),
        ({"chat_template_kwargs": {"mood": None}}, {}),
        (
            {"tools": [CLOCK], "chat_template_kwargs": {"mood": "dry", "tools": [WEATHER]}},
            {"tools": [CLOCK], "mood": "dry"},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("prompt", [ASK, "Rain?"], ids=["chat", "text"])
def test_the_policy_reads_what_its_row_says(folder, tmp_path, columns, variables, prompt):
    row = {"prompt": prompt, "answer": "no", **columns}
    path = write_lines(tmp_path / "a.jsonl", row, {"prompt": prompt, "answer": "yes"})
    tokenizer = HuggingFaceTokenizer(folder, Chat(variables={"mood": "sunny"}))
    found = problems(path, tokenizer)
    mine, other = sorted([*found.train], key=lambda one: one.id)
    assert mine.tokens == told(folder, **{"mood": "sunny"} | variables)
    assert other.tokens == told(folder, mood="sunny")  # the row's own are nobody else's
    assert mine.columns == {"answer": "no", **columns}  # rewards are told as well


def test_what_parquet_fills_in_is_not_given(folder, tmp_path):
    tools = [{"a": {"b": 1, "x": [{"y": 2}]}}, {"a": {"c": [True]}}]
    rows = [{"prompt": ASK, "answer": "no", "tools": [tool]} for tool in tools]
    path = write_rows(tmp_path / "a.parquet", rows)
    tokenizer = HuggingFaceTokenizer(folder)
    found = problems(path, tokenizer)
    texts = sorted(tokenizer.decode(one.tokens).partition("]user")[0] for one in found.train)
    assert [json.loads(f"{text}]") for text in texts] == [[tool] for tool in tools]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"tools": "no JSON"}, "field 'tools', is 'no JSON': expected JSON, but it is broken JSON"),
        ({"tools": ["weather"]}, "field 'tools', .* expected a list of objects"),
        ({"tools": 3}, "field 'tools', is 3: expected a list of objects"),
        ({"chat_template_kwargs": '"x"'}, "'chat_template_kwargs', .* expected an object"),
        ({"chat_template_kwargs": {"tempo": 1}}, "has no variable 'tempo' to set"),
        ({"chat_template_kwargs": {"messages": []}}, "has no variable 'messages' to set"),
    ],
    ids=str,
)
def test_what_cannot_be_shown_is_refused_by_row(folder, tmp_path, columns, words: str):
    rows = [{"prompt": ASK, "completion": "no"}, {"prompt": ASK, "completion": "no", **columns}]
    path, tokenizer = write_lines(tmp_path / "a.jsonl", *rows), HuggingFaceTokenizer(folder)
    for read in (problems, lambda *of: ExampleReader(of[1], 99).read([of[0]], 0.0)):
        with pytest.raises(UserError, match=rf"a\.jsonl, line 2, .*{words}") as caught:
            read(path, tokenizer)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("columns", [{"tools": [CLOCK]}, {"chat_template_kwargs": {"mood": "x"}}])
def test_without_a_template_it_is_refused(tmp_path, columns):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, eos_token="<eos>"))
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b", **columns})
    for read in (problems, lambda *of: ExampleReader(of[1], 99).read([of[0]], 0.0)):
        with pytest.raises(UserError, match=r"line 1, .* no chat template to set tools"):
            read(path, tokenizer)


def test_a_column_that_is_prompt_or_answer_is_no_tool(tmp_path, folder):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "Which?", "tools": "hammer"})
    tokenizer = HuggingFaceTokenizer(folder)
    (one,) = problems(path, tokenizer, schema=ProblemSchema("", "tools")).train
    assert one.columns["answer"] == "hammer" and "hammer" not in tokenizer.decode(one.tokens)


@pytest.mark.parametrize("rows", ["messages", "prompt and completion"])
def test_examples_are_learned_with_their_tools(folder, tmp_path, rows: str):
    output = {"role": "assistant", "content": "It is ten."}
    row = (
        {"messages": [*ASK, output]}
        if rows == "messages"
        else {"prompt": ASK, "completion": [output]}
    )
    path = write_lines(tmp_path / "a.jsonl", row | {"tools": [CLOCK]}, row)
    tokenizer = HuggingFaceTokenizer(folder)
    mine, other = ExampleReader(tokenizer, 999).read([path], 0.0).train
    assert tokenizer.decode(mine.tokens[~mine.in_loss].tolist()).startswith(json.dumps([CLOCK]))
    assert "clock" not in tokenizer.decode(other.tokens.tolist())
    learned = tokenizer.encode("It is ten.<eos>")
    assert mine.tokens[mine.in_loss].tolist() == learned == other.tokens[other.in_loss].tolist()


# --- images ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("image", "a.png"), ("images", ["a.png"]), ("video", {"bytes": "x"})),
        *(("videos", [[1, 2]]), ("audio", "a.mp3")),
    ],
)
def test_what_no_policy_is_shown_is_said_and_not_learned_from(folder, tmp_path, name, value):
    rows = [{"prompt": ASK, "completion": "no", name: each} for each in (None, value, value)]
    path, tokenizer = write_lines(tmp_path / "a.jsonl", *rows), HuggingFaceTokenizer(folder)
    assert f"{name} (2 rows)" in str(problems(path, tokenizer)).partition("not shown to")[2]
    with pytest.raises(UserError, match=rf"line 2, field '{name}', is .* reads text alone"):
        ExampleReader(tokenizer, 99).read([path], 0.0)


def test_a_column_without_any_is_nothing_to_say(folder, tmp_path):
    rows = [{"prompt": ASK, "completion": "no", "images": value} for value in (None, [], "", {})]
    path, tokenizer = write_lines(tmp_path / "a.jsonl", *rows), HuggingFaceTokenizer(folder)
    assert "images" not in str(problems(path, tokenizer))
    assert len(ExampleReader(tokenizer, 99).read([path], 0.0).train) == 4
