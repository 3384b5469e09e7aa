"""Last parts of options stand for them, in all commands, files and programs alike."""

import dataclasses
from pathlib import Path

import pytest
from config_classes import CLASSES

from pat_jax.common.errors import UserError
from pat_jax.common.options.declared import options_of
from pat_jax.config import command_line as cli
from pat_jax.config.from_python import words
from pat_jax.config.run import RunConfig

OTHERS = ("reward_model.max_length", "teacher.top_k", "critic.lora.rank")  # others mean the policy
# What users of other projects type, and what it is here.
BARE = {
    "num_generations": ("4", "rollout.num_generations"),
    "temperature": ("0.9", "rollout.temperature"),
    "max_completion_length": ("64", "rollout.max_completion_length"),
    "beta": ("0.04", "algorithm.beta"),
    "learning_rate": ("1e-6", "optimizer.learning_rate"),
    "warmup_steps": ("3", "optimizer.warmup_steps"),
    "tokens_per_micro_batch": ("999", "algorithm.tokens_per_micro_batch"),
    "top_k": ("7", "rollout.top_k"),
    "rank": ("4", "lora.rank"),
    "export_dir": ("there", "checkpoint.export_dir"),
    "chat_template_kwargs": ('{"a": 1}', "data.chat_template_kwargs"),
}


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refused(*argv: str, config_class: type = RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        cli.parse(argv, config_class)
    return str(caught.value)


@pytest.mark.parametrize("name", BARE)
def test_a_last_part_is_its_option(name: str, yaml_file):
    text, full = BARE[name]
    wanted = cli.parse([f"--{full}", text])
    assert wanted != cli.parse([])
    assert cli.parse([f"--{name}", text]) == wanted
    assert cli.parse([f"--{name.replace('_', '-')}={text}"]) == wanted
    assert cli.parse(["--config", yaml_file(f"{name}: '{text}'\n")]) == wanted
    assert cli.parse(words(None, {name: text})) == wanted
    assert cli.parse(words({name: text}, {})) == wanted


@pytest.mark.parametrize("command", CLASSES)
def test_a_last_part_that_one_option_has_is_taken(command: str):
    """Except where others mean something else by it."""
    made = CLASSES[command]
    options = list(options_of(made()))
    full = {name for one in options for name in (one.name, one.short)}
    leaves = [one.name.rpartition(".")[2] for one in options]
    for option in options:
        leaf = option.name.rpartition(".")[2]
        if leaf in full or leaves.count(leaf) > 1 or option.name in OTHERS:
            continue
        texts = (
            [str(each) for each in option.default] if option.takes_many else [str(option.default)]
        )
        if option.default is None or not all(texts):
            continue
        given, bare = ([f"--{name}={text}" for text in texts[:1]] for name in (option.name, leaf))
        try:
            wanted = cli.parse(given, made, presets=None)
        except UserError:
            continue
        assert cli.parse(bare, made, presets=None) == wanted, leaf


def test_a_full_name_is_never_another_options_last_part():
    config = cli.parse(["--model", "mine", "--steps", "3", "--data", "d.jsonl"])
    assert (config.model, config.steps, config.data.files) == ("mine", 3, ("d.jsonl",))
    assert config.teacher.model == config.critic.model == "" and config.warm_start.steps == 0


def test_where_it_would_be_a_guess_the_candidates_are_named(yaml_file):
    for sentence in (
        refused("--every", "5"),
        refused("every=5"),
        refused("--config", yaml_file("seed: 1\nevery: 5\n")),
    ):
        assert sentence.startswith("option --every")
        assert "--eval.every" in sentence and "--checkpoint.every" in sentence
    with pytest.raises(UserError, match=r"eval=\{'every': 5\}.*checkpoint=\{'every': 5\}"):
        words(None, {"every": 5})


def test_what_others_mean_otherwise_is_answered(yaml_file):
    assert "--rollout.max_prompt_length" in refused("--max_length", "512")
    assert "line 1" in refused("--config", yaml_file("max_length: 512\n"))


def test_two_spellings_of_one_option_must_agree(yaml_file):
    same = ["--temperature", "0.9", "--rollout.temperature", "0.9"]
    assert cli.parse(same) == cli.parse(same[:2])
    sentence = refused(*same[:3], "0.8")
    assert "--temperature 0.9" in sentence and "--rollout.temperature 0.8" in sentence
    assert "twice" in refused("--config", yaml_file("beta: 1\nalgorithm: {beta: 2}\n"))
    with pytest.raises(UserError, match=r"temperature=0\.9 .*rollout=\{'temperature': 0\.8\}"):
        words(None, {"temperature": 0.9, "rollout": {"temperature": 0.8}})
    with pytest.raises(UserError, match=r"data='a' and files='b' are one option"):
        words(None, {"data": "a", "files": "b"})
    once = words(None, {"rollout": {"temperature": 1.0}})
    for other in ({"temperature": None}, {"eval": None}):
        assert words(None, {**other, "rollout": {"temperature": 1.0}}) == once
    assert words({"rollout": None}, {"rollout": {"temperature": 1.0}}) == once
    both = words(None, {"temperature": 1, "rollout": {"temperature": 1.0}})
    assert cli.parse(both) == cli.parse(once)


def test_later_sources_win_however_they_are_spelt(yaml_file):
    path = yaml_file("rollout: {temperature: 0.5}\nbeta: 0.1\n")
    config = cli.parse(["--config", path, "--temperature", "0.9"])
    assert (config.rollout.temperature, config.algorithm.beta) == (0.9, 0.1)
    again = cli.parse(words({"rollout.temperature": 0.5, "beta": 0.1}, {"temperature": 0.9}))
    assert again == dataclasses.replace(
        cli.parse([]), rollout=again.rollout, algorithm=again.algorithm
    )
    assert (again.rollout.temperature, again.algorithm.beta) == (0.9, 0.1)
