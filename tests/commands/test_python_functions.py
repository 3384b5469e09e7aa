"""The commands as functions of Python: what they return is what the command writes."""

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import pytest
from evaluations import evaluate_here
from row_writing import write_lines
from runs import SMALL_ROLLOUT, json_lines, named, without_times, write_checkpoint

import pat_jax
from pat_jax import SavedRun, UserError
from pat_jax.common.run_command import run_command
from pat_jax.rl.data.examples import Examples
from pat_jax.run.logging.metrics import read_metrics

SUMS = [(i, j) for i in range(8) for j in range(8)]
EXAMPLES = [{"prompt": f"{i}+{j}=", "completion": f"{i + j}"} for i, j in SUMS]
PAIRS = [{"prompt": f"{i}+{j}?", "chosen": f"{i + j}", "rejected": "no"} for i, j in SUMS]
PROBLEMS = [{"prompt": f"{i}+{j}=", "answer": f"{i + j}"} for i, j in SUMS[:6]]
LEARNING: dict[str, Any] = {"devices": 2, "steps": 2, "batch_size": 16, "max_length": 64}
LEARNING |= {"tokens_per_micro_batch": 256, "eval": {"every": 1, "share": 0.1}}
EVALUATING = {"batch": 8, "max_prompt_length": 160, "max_completion_length": 24}
EVALUATING |= {"layout": "dp2tp1", "devices": 2}
GENERATING = {"batch": 4, "max_length": 128, "layout": "dp2tp1", "devices": 2}
PROMPTS: list[Any] = [
    "the cat",
    [{"role": "user", "content": "hi"}],
    [5, 6, 7],
    {"token_ids": [5, 6, 7], "n": 2, "logprobs": 1, "id": "mine", "metadata": {"a": [1]}},
    {"prompt": "a", "no_such_field": 1},
]
LINES = [{"prompt": PROMPTS[0]}, {"messages": PROMPTS[1]}, {"token_ids": PROMPTS[2]}, *PROMPTS[3:]]


@pytest.fixture(scope="module", autouse=True)
def two_devices() -> Iterator[None]:
    """Programs are compiled into the cache of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("evaluate", "evaluate_pairs", "fine_tune", "generate"):
            module = import_module(f"pat_jax.commands.{name}")
            patch.setattr(module, "configure", lambda count: jax.devices()[:2])
        patch.setattr("pat_jax.run.results.saved_run.configure", lambda count: jax.devices()[:2])
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("functions") / "model"))


@pytest.fixture(scope="module")
def taught(model: str, tmp_path_factory) -> SavedRun:
    folder = tmp_path_factory.mktemp("taught") / "run"
    return pat_jax.sft(LEARNING, model=model, data=EXAMPLES, run_dir=str(folder))


def command(monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]) -> None:
    """Runs the command in this process."""
    given = [f"--{key}={value}" for key, value in options.items()]
    monkeypatch.setattr(sys, "argv", [name, *given])
    run_command(import_module(f"pat_jax.{name}").main)


def measured(run: SavedRun) -> list[dict[str, Any]]:
    return without_times(run.metrics)


def test_a_run_on_rows_is_that_of_the_command_on_a_file(taught, model, tmp_path, monkeypatch):
    data = write_lines(tmp_path / "sums.jsonl", *EXAMPLES)
    options = {k: v for k, v in LEARNING.items() if k != "eval"} | {"eval.every": 1}
    options |= {"eval.share": 0.1, "model": model, "data": data, "run_dir": tmp_path / "run"}
    command(monkeypatch, "sft", options)
    assert without_times(read_metrics(tmp_path / "run" / "metrics.jsonl")) == measured(taught)
    assert [row["step"] for row in taught.metrics] == [0, 1, 2]
    assert (taught.config.batch_size, taught.config.loss) == (16, "cross_entropy")
    assert json_lines(Path(taught.config.data.files[0])) == EXAMPLES
    assert "train/loss" in taught.plot("train/loss").svg()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reward_model", {}),
        pytest.param("sft", {"loss": "dpo"}, marks=pytest.mark.slow),
    ],
)
def test_pairs_are_learned_and_what_was_learned_is_exported(name, options, model, tmp_path):
    run = getattr(pat_jax, name)(
        LEARNING,
        model=model,
        data=PAIRS,
        eval={"data": PAIRS[:9], "every": 1},
        run_dir=str(tmp_path / "run"),
        checkpoint={"export_dir": str(tmp_path / "by_the_run")},
        **options,
    )
    accuracy = run.metrics[-1]["eval/accuracy"]
    exported = run.export(tmp_path / "exported")
    for path in (tmp_path / "by_the_run").iterdir():
        assert (exported / path.name).read_bytes() == path.read_bytes(), path.name
    if name == "reward_model":
        given = {"reward_model": str(exported), "devices": 2, "out": str(tmp_path / "found")}
        found = pat_jax.evaluate(given, data=PAIRS[:9])
        assert found.sets["heldout"]["pairs"] == found.all["pairs"] == 9
        assert found.sets["heldout"]["accuracy"] == pytest.approx(accuracy)
        assert f"{accuracy:.3f}" in str(found)


def test_a_run_that_is_interrupted_raises_and_goes_on(taught, model, tmp_path, monkeypatch):
    draw = Examples.draw

    def interrupted(examples: Examples, position: int, size: int) -> Any:
        if position:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return draw(examples, position, size)

    folder = str(tmp_path / "run")
    monkeypatch.setattr(Examples, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pat_jax.sft(LEARNING, model=model, data=EXAMPLES, run_dir=folder)
    assert [row["step"] for row in SavedRun(folder).metrics] == [0, 1]
    again = pat_jax.sft(run_dir=folder, resume=True)
    assert without_times(again.metrics)[-1] == measured(taught)[-1]


@pytest.mark.slow  # a run of train
def test_training_goes_on_from_what_was_taught(taught, tmp_path, monkeypatch):
    def short(completions: list[str], **columns: object) -> list[float]:
        return [float(len(text) < 20) for text in completions]

    monkeypatch.setattr("pat_jax.commands.train.configure", lambda count: jax.devices()[:2])
    options = named(SMALL_ROLLOUT) | {"steps": 1, "warm_start.steps": 0, "eval.every": 0}
    options |= {"model": str(taught.export(tmp_path / "taught")), "rollout.max_prompt_length": 64}
    problems = [{"prompt": row["prompt"], "answer": ""} for row in EXAMPLES]
    run = pat_jax.train(options, data=problems, reward=short, run_dir=str(tmp_path / "run"))
    assert [row["reward/mean"] for row in run.metrics if "reward/mean" in row]
    answers = pat_jax.generate(PROMPTS[:1], GENERATING, run=run, max_completion_length=4)
    assert len(answers) == 1 and answers[0].token_ids


def test_what_it_evaluates_is_what_the_command_writes(taught, tmp_path, monkeypatch):
    def even(completions: list[str], **columns: object) -> list[float]:
        return [float(len(text) % 2 == 0) for text in completions]

    data = str(write_lines(tmp_path / "heldout.jsonl", *PROBLEMS))
    given = ["--run_dir", str(taught.folder.absolute()), "--data", data, "--num_generations", "2"]
    theirs = evaluate_here(monkeypatch, tmp_path, *given, "--reward", "mine.py:even")
    options = EVALUATING | {"num_generations": 2, "out": str(tmp_path / "ours")}
    ours = pat_jax.evaluate(options, run=taught, data=PROBLEMS, reward=even)
    assert (ours.sets, ours.all) == (theirs["sets"], theirs["all"])
    assert 0 < ours.sets["heldout"]["mean"]["value"] < 1
    assert ours.content == json.loads((ours.folder / "results.json").read_text())
    assert str(ours).splitlines()[1].split()[:3] == ["heldout", "6", "2"]


def test_an_evaluation_that_is_interrupted_goes_on(taught, tmp_path, monkeypatch):
    from pat_jax.commands import evaluate as body

    generated, answers = list[int](), body._answers

    def interrupted(*given: Any) -> Any:
        for i, done in answers(*given):
            generated.append(i)
            yield i, done
            if len(generated) == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(body, "_answers", interrupted)
    options = EVALUATING | {"out": str(tmp_path / "out"), "reward": "exact"}
    with pytest.raises(KeyboardInterrupt):
        pat_jax.evaluate(options, run=taught, data=PROBLEMS)
    found = pat_jax.evaluate(out=str(tmp_path / "out"), resume=True, data=PROBLEMS)
    assert len(generated) == len(PROBLEMS) == found.all["problems"]
    with pytest.raises(UserError, match="expected an evaluation to go on with"):
        pat_jax.evaluate(out=str(tmp_path / "out"), resume=True)


def test_answers_are_the_lines_that_the_command_writes(model, tmp_path, monkeypatch, capsys):
    file = write_lines(tmp_path / "prompts.jsonl", *LINES)
    options: dict[str, Any] = GENERATING | {"model": model, "max_completion_length": 5}
    out = tmp_path / "out.jsonl"
    command(monkeypatch, "generate", options | {"prompts": file, "out": out})
    theirs = json_lines(out)
    capsys.readouterr()
    for prompts in (PROMPTS, str(file)):
        ours = [asdict(answer) for answer in pat_jax.generate(prompts, options)]
        assert [answer.pop("error") for answer in ours[:-1]] == [""] * 5
        name = f"{file}, line 5" if prompts is not PROMPTS else "prompt 5"
        assert ours[-1]["error"].startswith(f"{name}: unknown field 'no_such_field'")
        for answer, line in zip(ours, theirs, strict=True):
            assert {k: answer[k] for k in line if k != "error"} == {
                k: v for k, v in line.items() if k != "error"
            }
    assert [(x["line"], x["sample"]) for x in ours] == [
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 0),
        (4, 1),
        (5, 0),
    ]
    assert capsys.readouterr().out == "" and len(list(tmp_path.iterdir())) == 2


def test_answers_are_kept_in_a_file_if_one_is_named(taught: SavedRun, tmp_path: Path):
    options = GENERATING | {"max_completion_length": 4, "out": str(tmp_path / "out.jsonl")}
    first = pat_jax.generate(PROMPTS[:1], options, run=taught)
    both = pat_jax.generate(PROMPTS[:2], options, run=taught.folder, resume=True)
    assert both[0] == first[0] and len(both) == len(json_lines(tmp_path / "out.jsonl")) == 2
    del options["out"]
    session = pat_jax.session(options, run=taught)
    assert session.generate(PROMPTS[:2]) == [[answer] for answer in both]
    with pytest.raises(UserError, match="--model is 'tiny': expected none with run"):
        pat_jax.generate(PROMPTS[:1], options, run=taught, model="tiny")


def test_a_config_chooses_the_data_type_in_which_a_run_generates(taught: SavedRun):
    halves = pat_jax.session(GENERATING | {"compute_dtype": "bfloat16"}, run=taught)
    assert {str(x.dtype) for x in jax.tree.leaves(halves.session.engine.weights.params)} == {
        "bfloat16"
    }


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("sft", {"loss": "dop"}, "option --loss is 'dop'"),
        ("sft", {"data": 3}, "data is 3: expected names of files, or rows"),
        ("reward_model", {"data": [{"chosen": b""}]}, "row 1, column 'chosen', is b''"),
        ("evaluate", {"data": PROBLEMS}, "option --model is not given"),
        ("evaluate", {"run": "no/where"}, "no/where has no config.yaml"),
        ("evaluate", {"reward": 3, "data": PROBLEMS}, "reward is 3: expected a function"),
        ("generate", {"prompts": [], "model": "tiny"}, "prompts is empty"),
        ("generate", {"prompts": [3], "model": "tiny"}, "prompt 1: it is 3: expected text"),
        ("generate", {"prompts": [{"id": {1}}], "model": "tiny"}, "prompt 1, column 'id', is {1}"),
        ("generate", {"prompts": ["a"], "resume": True}, "option --resume is True: expected with"),
        ("generate", {"prompts": "no/where"}, "option --prompts is 'no/where'"),
        ("doctor", {"devices": -1}, "option --devices is -1"),
    ],
)
def test_what_is_given_by_mistake_is_one_sentence(name: str, given: dict[str, Any], words: str):
    with pytest.raises(UserError) as caught:
        getattr(pat_jax, name)(**given)
    assert words in str(caught.value)
