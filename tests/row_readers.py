"""All readers of rows by one name each, and what they read as texts."""

from pathlib import Path
from typing import Any

from pat_jax.rl.data.example_reader import ExampleReader, PairReader
from pat_jax.rl.data.problems import load_problems
from pat_jax.rl.data.schemas import PairSchema, ProblemSchema
from pat_jax.rl.text.tokenizer import ChatMessage, HuggingFaceTokenizer

READERS = ("train", "sft", "dpo", "reward_model")
CHATML = (
    "{% for m in messages %}<im>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant:{% endif %}"
)


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def assistant(text: str, **keys: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **keys}


def system(text: str) -> ChatMessage:
    return {"role": "system", "content": text}


# What each reader needs beside a prompt.
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
        found = load_problems([path], tokenizer, schema=ProblemSchema(key), **options)
        tokens = [prompt.tokens for prompt in found.train.first(9)]
    elif reader == "sft":
        found = ExampleReader(tokenizer, 999, bad_rows=bad_rows).read([path], 0.0)
        tokens = [one.tokens for one in found.train]
    else:
        is_scored = reader == "reward_model"
        pairs = PairReader(tokenizer, 999, is_scored, PairSchema(key), bad_rows=bad_rows)
        found = pairs.read([path], 0.0)
        tokens = [pair.chosen.tokens for pair in found.train]
    return [tokenizer._tokenizer.decode([int(x) for x in each]) for each in tokens], str(found)
