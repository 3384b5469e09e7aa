"""From options to files, and from files to what is learned from."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from row_writing import write_lines

from pat_jax.common.errors import UserError
from pat_jax.config.by_model import KnownModel, settled
from pat_jax.config.command_line import parse
from pat_jax.rl.data import arithmetic
from pat_jax.rl.data.epochs import START
from pat_jax.rl.rewards.responses import trial_responses
from pat_jax.rl.text.tokenizer import PromptText, flatten_messages
from pat_jax.run.start.heldout import set_names
from pat_jax.run.start.task import Task, check_task, find_files, load_task


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "c[1].jsonl", "c1.jsonl", "deep/er/d.parquet"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("b.jsonl a.jsonl", "b.jsonl a.jsonl"),
        ("[ab].jsonl", "a.jsonl b.jsonl"),
        ("b.jsonl *.jsonl", "b.jsonl a.jsonl c1.jsonl c[1].jsonl"),
        ("c[1].jsonl", "c[1].jsonl"),  # a file's name before it is a pattern
        ("**/*.parquet", "deep/er/d.parquet"),
    ],
)
def test_files_are_named_or_match_a_pattern_each_once(folder, names: str, found: str):
    assert find_files("data", names.split()) == [Path(name) for name in found.split()]


@pytest.mark.parametrize("name", ["absent.jsonl", "*.parquet", "[", ""])
def test_a_name_without_a_file_is_refused(folder, name: str):
    with pytest.raises(UserError) as caught:
        find_files("eval.data", ["a.jsonl", name])
    assert str(caught.value).startswith(f"option --eval.data is {name!r}: no such file")


# --- tasks -----------------------------------------------------------------------------------


def test_a_built_in_model_alone_brings_a_task_and_lengths_that_hold_it():
    config = parse(["--model", "tiny"])
    check_task(config.task)
    model = KnownModel("tiny", is_checkpoint=False, context=4096, platform="cpu")
    check_task(settled(config, model)[0].task)


class Words:
    """One token a word."""

    vocab_size, pad_id, eos_ids, checksum = 1000, 0, (1,), 0

    def encode(self, text: str) -> list[int]:
        return [2 + len(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join("x" * (token - 2) for token in tokens)

    def encode_prompt(self, prompt: PromptText, variables: object = None) -> list[int]:
        return self.encode(flatten_messages(prompt))


@pytest.fixture
def load(tmp_path: Path):
    def problems(name: str, numbers: range) -> str:
        rows = ({"problem": f"What is {i} ?", "answer": i} for i in numbers)
        return str(write_lines(tmp_path / name, *rows))

    def task(*options: str, **files: range) -> Task:
        """Of the files that are named by `files`, and of `{name}` in options."""
        paths = {name: problems(f"{name}.jsonl", numbers) for name, numbers in files.items()}
        argv = ["--model", "m", "--rollout.max_prompt_length", "96"]
        argv += [option.format(**paths) for option in options]
        return load_task(parse(argv).task, Words())

    return task


def seen(task: Task, size: int, steps: int) -> set[str]:
    cursor, texts = START, set[str]()
    for _ in range(steps):
        batch, cursor = task.train.draw(cursor, size)
        texts |= {prompt.text for prompt in batch}
    return texts


def test_nothing_is_held_out_where_nothing_evaluates(load):
    size = ["--rollout.prompts_per_step", "32"]
    everything = load("--data", "{a}", *size, "--eval.every", "0", a=range(320))
    assert len(seen(everything, 32, 10)) == 320 and not everything.heldout
    split = load("--data", "{a}", *size, a=range(320))
    (one,) = split.heldout
    held = {prompt.text for prompt in one.prompts}
    assert one.name == "heldout"
    assert 10 <= len(held) <= 60 and not held & seen(split, 32, 8)
    assert split.note.startswith(f"problems: {320 - len(held)} to train on, {len(held)} held out;")


def test_other_files_are_evaluated_on(load):
    files = {"a": range(30), "b": range(30, 64), "c": range(100, 130)}
    options = ["--data", "{a}", "{b}", "--eval.data", "{c}", "--rollout.prompts_per_step", "32"]
    task = load(*options, **files)
    assert len(seen(task, 32, 2)) == 64
    (c,) = task.heldout
    assert c.name == "c"
    assert [prompt.columns["answer"] for prompt in c.prompts] == [str(i) for i in range(100, 130)]
    assert len({prompt.id for prompt in task.train.first(32)}) == 32
    few = load(*options, "--eval.num_prompts", "7", **files)
    (seven,) = few.heldout
    assert len(seven.prompts) == 7 and all(prompt in c.prompts for prompt in seven.prompts)
    again = load(*options, "--eval.num_prompts", "7", "--seed", "3", **files)
    assert again.heldout == few.heldout
    assert task.note.splitlines() == [
        "problems: 64 to train on; left out: 0 longer than 96 tokens",
        "problems: 30 held out; left out: 0 longer than 96 tokens",
    ]
    both = load(*options, **(files | {"c": range(60, 70)}))
    assert both.note.endswith("0 longer than 96 tokens; 4 of them are trained on as well")


def test_each_file_that_is_evaluated_on_is_a_set_of_its_own(load, tmp_path):
    files = {"a": range(40), "b": range(100, 110), "c": range(200, 230)}
    options = ["--data", "{a}", "--eval.data", "{b}", "{c}", "--eval.num_prompts", "20"]
    task = load(*options, "--rollout.prompts_per_step", "32", **files)
    assert [(one.name, len(one.prompts)) for one in task.heldout] == [("b", 10), ("c", 20)]
    assert len(task.note.splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("aime.jsonl math500.parquet", "aime math500"),
        ("gsm8k/main/test-*.parquet MATH-500/test.jsonl", "gsm8k MATH-500"),
        ("aime_2024/data/train-00000-of-00001.parquet", "aime_2024"),
        ("a/x.json b/x.json b/x_2.json", "x x_2 x_2_2"),
        ("test.jsonl data/test-1.jsonl", "test test-1"),
        ("/tmp/DAPO/validation.parquet", "DAPO"),
        ("two words.json", "two_words"),
        ("f/training_hard.jsonl", "training_hard"),
    ],
)
def test_sets_are_called_by_what_says_something(words: str, names: str):
    parts = words.split() if "two" not in words else [words]
    assert set_names(parts) == names.split()


def test_every_problem_needs_what_the_reward_compares_with(load, tmp_path):
    (tmp_path / "b.json").write_text('[{"prompt": "?"}]')
    options = ["--data", "{a}", str(tmp_path / "b.json"), "--eval.every", "0"]
    with pytest.raises(UserError, match="reward 'math' needs the column 'answer'"):
        load(*options, a=range(40))
    assert load(*options, "--reward", "mine.py:score", a=range(40)).rewards == ["mine.py:score"]


def test_a_reward_is_told_of_columns_that_few_rows_have(tmp_path):
    """Whichever rows an iteration draws: a function that names one would end the run in the others."""
    rows = [{"prompt": f"p {i}", "answer": i} | ({"level": 3} if i == 5 else {}) for i in range(40)]
    data = write_lines(tmp_path / "d.jsonl", *rows)
    argv = ["--model", "m", "--data", str(data), "--eval.every", "0"]
    argv += ["--rollout.max_prompt_length", "96"]
    task = load_task(parse(argv).task, Words())
    (prompt,) = (one for one in task.train.first(40) if one.columns["answer"] == "7")
    for told in trial_responses(prompt, task.columns):
        assert told.columns["level"] is None and told.columns["answer"] == "7"
    assert load_task(parse([]).task, arithmetic.TOKENIZER).columns == ["answer"]
