"""The evaluate command: published formats as they are, its files, its numbers, and bad input."""

import json
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import compiled_during, completions, evaluate_here
from metrics_table import untold
from row_writing import write_lines, write_rows
from runs import QWEN3, SMALL_ROLLOUT, finish, start, write_checkpoint, write_problems
from runs import run as train

from pat_jax.run.files.folder import lock_folder
from pat_jax.run.logging.metrics import read_metrics


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# Invented rows in the columns of the published files.
FORMATS: dict[str, Callable[[int], dict[str, Any]]] = {
    "MATH-500/test.jsonl": lambda i: {
        "problem": f"What is $\\frac{{{i}}}{{2}}$?",
        "solution": f"It is $\\boxed{{\\frac{{{i}}}{{2}}}}$.",
        "answer": f"\\frac{{{i}}}{{2}}",
        "subject": "Algebra",
        "level": 1 + i % 5,
        "unique_id": f"test/algebra/{i}.json",
    },
    "aime_2024/data/train-00000-of-00001.parquet": lambda i: {
        "id": 60 + i,
        "problem": f"Find {i} + 100.",
        "solution": "It is so.",
        "answer": f"{100 + i}",
        "url": "https://example.org",
        "year": "2024",
    },
    "gsm8k.jsonl": lambda i: {
        "question": f"Ann has {i} pears and eats one. How many?",
        "answer": f"She has {i} - 1 = <<{i}-1={i - 1}>>{i - 1}.\n#### {i - 1}",
    },
    "verl/gsm8k/test.parquet": lambda i: {
        "data_source": "openai/gsm8k",
        "prompt": chat(f'What is {i} plus 9? Put it after "####".'),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 9)},
        "extra_info": {"answer": f"... #### {i + 9}", "index": i, "split": "test"},
    },
}
NAMES = ["MATH-500", "aime_2024", "gsm8k", "gsm8k_2"]


def write_formats(folder: Path) -> list[str]:
    paths = []
    for name, row in FORMATS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        paths.append(str(write_rows(folder / name, [row(i) for i in range(5, 15)])))
    return paths


def without(*columns: str) -> list[dict[str, Any]]:
    rows = [FORMATS["gsm8k.jsonl"](i) for i in range(6)]
    return [{name: x for name, x in row.items() if name not in columns} for row in rows]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("evaluate") / "model")


@pytest.fixture
def run(model: Path, tmp_path: Path, monkeypatch) -> Callable[..., dict[str, Any]]:
    """Runs the command in this process; returns its results."""

    def run(*options: str, **how: Any) -> dict[str, Any]:
        return evaluate_here(monkeypatch, tmp_path, "--model", str(model), *options, **how)

    return run


def test_published_formats_are_evaluated_as_they_are(run, tmp_path: Path, monkeypatch, capsys):
    """End to end: every file a line of the table, nothing compiled once the session is there."""
    compiled = compiled_during(monkeypatch)
    found = run("--data", *write_formats(tmp_path), "--num_generations", "3", fitted=True)
    assert compiled == []
    assert list(found["sets"]) == NAMES
    assert all(one["problems"] == 10 and one["samples"] == 3 for one in found["sets"].values())
    assert found["all"]["problems"] == 40
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1:6]] == [*NAMES, "all"]
    printed = completions(tmp_path / "out")
    assert len(printed) == 120 and {line["data"] for line in printed} == set(NAMES)
    places = [(line["data"], line["id"], line["sample"]) for line in printed]
    assert places == [(name, i, n) for name in NAMES for i in range(1, 11) for n in range(3)]
    assert all(line["reward"] == 0 and "step" not in line for line in printed)


def test_numbers_are_those_of_the_completions(run, tmp_path: Path, capsys):
    """Of a reward that half of the samples earn, by another way from the file of completions."""
    files = write_formats(tmp_path)[:2]
    options = "--num_generations 5 --pass_at 2 5 --reward mine.py:even mine.py:length"
    found = run("--data", *files, *options.split(), "--reward_weights", "1", "0")
    printed = completions(tmp_path / "out")
    for name, one in [*found["sets"].items(), ("all", found["all"])]:
        own = [line for line in printed if name in (line["data"], "all")]
        by_problem = defaultdict(list)
        for line in own:
            assert line["rewards"]["even"] == line["reward"]
            by_problem[line["data"], line["id"]].append(line["reward"])
        rewards = np.array(list(by_problem.values()))
        assert one["mean"]["value"] == pytest.approx(rewards.mean())
        assert 0 < one["mean"]["low"] < one["mean"]["value"] < one["mean"]["high"] < 1
        assert one["pass"]["5"]["value"] == pytest.approx(rewards.max(axis=1).mean())
        pairs = [(a, b) for a in range(5) for b in range(a + 1, 5)]
        best = np.mean([rewards[:, pair].max(axis=1).mean() for pair in pairs])
        assert one["pass"]["2"]["value"] == pytest.approx(best)
        assert one["rewards"]["even"] == pytest.approx(rewards.mean())
        assert one["tokens"] == sum(line["tokens"] for line in own)
        cut = np.mean([line["finish"] == "length" for line in own])
        assert one["truncated"] == pytest.approx(cut)
    header = capsys.readouterr().out.splitlines()[0].split()
    assert header == ["problems", "samples", "mean", "pass@2", "pass@5", "tokens", "truncated"]


def test_samples_without_a_reward_are_counted_and_left_out(run, tmp_path: Path, capsys):
    """By a reward that needs no answer, of a file that has none."""
    data = str(write_lines(tmp_path / "bare.jsonl", *without("answer")))
    found = run("--data", data, "--num_generations", "4", "--reward", "mine.py:none")["all"]
    rewards = [line["reward"] for line in completions(tmp_path / "out")]
    assert found["failed"] == rewards.count(None) > 0 and found["mean"]["value"] == 1
    assert found["pass"]["4"]["problems"] < found["problems"] == 6
    assert "without reward" in capsys.readouterr().out


def test_a_policy_is_evaluated_by_a_reward_model(run, tmp_path: Path, monkeypatch):
    judge = write_checkpoint(tmp_path / "judge", replace(QWEN3, head="scalar"))
    chats = [[{"role": "system", "content": "Be brief."}, *chat(f"Who is {i}?")] for i in range(4)]
    data = write_lines(tmp_path / "chats.jsonl", *({"prompt": each} for each in chats))
    compiled = compiled_during(monkeypatch)
    options = ["--data", str(data), "--num_generations", "2"]
    options += ["--reward", f"model:{judge}", "--reward_model.max_length", "256"]
    found = run(*options)["all"]
    assert compiled == []
    rewards = [line["reward"] for line in completions(tmp_path / "out")]
    assert len(rewards) == 8 and np.ptp(rewards) > 0
    assert found["mean"]["value"] == pytest.approx(np.mean(rewards)) and found["failed"] == 0


@pytest.mark.slow  # compiles a trainer
def test_published_formats_are_trained_on_and_the_export_is_evaluated(run, model: Path, tmp_path):
    files, run_dir = write_formats(tmp_path), tmp_path / "run"
    options = ["--model", str(model), "--data", *files, "--eval.data", *files[:2], "--steps", "1"]
    options += ["--rollout.max_prompt_length", "160", "--rollout.min_length", "224"]
    options += ["--eval.num_generations", "3", "--run_dir", str(run_dir)]
    output = train(*SMALL_ROLLOUT, *options, "--checkpoint.export_dir", str(run_dir / "hf"))
    assert "problems: 40 to train on" in output and "10 of them are trained on as well" in output
    first, last = read_metrics(run_dir / "metrics.jsonl")
    assert untold({*first, *last} - {"step", "time"}) == set()
    sets = {f"eval/{name}pass@3" for name in ("", "MATH-500/", "aime_2024/")}
    assert {name for name in first if "pass@" in name and "ci95" not in name} == sets
    asked = ("--data", *files[:2], "--num_generations", "3")
    found = run("--model", str(run_dir / "hf"), *asked)
    assert found["all"]["problems"] == 20
    again = run("--run_dir", str(run_dir), *asked, out="again")
    assert again["options"]["checkpoint"] == 1
    assert completions(tmp_path / "again") == completions(tmp_path / "out")


@pytest.mark.slow  # three commands
def test_the_same_seed_says_the_same_whatever_is_evaluated_beside_it(run, tmp_path: Path):
    one, other, *_ = write_formats(tmp_path)
    run("--data", one, "--num_prompts", "4", out="alone")
    run("--data", one, other, "--num_generations", "2", "--batch", "16", out="both")
    run("--data", one, "--num_prompts", "4", "--seed", "1", out="else")
    alone, both, elsewise = (completions(tmp_path / name) for name in ("alone", "both", "else"))
    texts = {(x["data"], x["id"], x["sample"]): x["completion"] for x in both}
    assert [texts["MATH-500", x["id"], 0] for x in alone] == [x["completion"] for x in alone]
    assert len(alone) == 4 and alone != elsewise
    assert len(set(texts.values())) == 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", ["option --data is not given: expected files of problems"]),
        ("--data {folder}/none.jsonl", ["option --data is '{folder}/none.jsonl': no such file"]),
        ("--data {folder}/empty.jsonl", ["{folder}/empty.jsonl holds no problems"]),
        ("{good} {folder}/bare.jsonl", ["'answer' ({folder}/bare.jsonl", "add it"]),
        ("--data {folder}/null.jsonl", ["no prompts to evaluate", "6 without an answer (the"]),
        ("{good} --max_prompt_length 5", ["6 longer than 5 tokens (--max_prompt_length ", "%)"]),
        ("{good} --num_generations 4 --pass_at 1 8", ["from 1 to --num_generations (4)"]),
        ("{good} --pass_at 1.5", ["--pass_at is '1.5': expected one integer"]),
        ("{good} --num_generations 4 --temperature 0", ["above 0 with --num_generations 4"]),
        ("{good} --num_generations 2 --top_k 1", ["--top_k is 1: expected 0 or at least 2"]),
        ("{good} --out {folder}", ["option --out is '{folder}': expected a new or empty folder"]),
        ("{good} --model tiny", ["--model is 'tiny': expected a Hugging Face checkpoint"]),
        ("{good} --max_completion_length 500", ["is 160 + 500 = 660", "512 tokens"]),
        ("{good} --n 4", ["unknown option --n", "--num_generations"]),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence_and_compile_nothing(run, refused, tmp_path, options, words):
    write_lines(tmp_path / "good.jsonl", *without())
    write_lines(tmp_path / "bare.jsonl", *without("answer"))
    write_lines(tmp_path / "null.jsonl", *({**row, "answer": None} for row in without()))
    (tmp_path / "empty.jsonl").touch()
    asked = options.format(folder=tmp_path, good=f"--data {tmp_path}/good.jsonl").split()
    message = refused(lambda: run(*asked), kept=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert all(word.format(folder=tmp_path) in message for word in words), message


COMMAND = ("-m", "pat_jax.evaluate")
KEPT = Path("unfinished", "iteration-0.jsonl")
RESUMED = [
    *("--batch", "4", "--devices", "2", "--layout", "dp2tp1", "--max_prompt_length", "160"),
    *("--max_completion_length", "150", "--num_generations", "2", "--reward", "math"),
]


@pytest.fixture(scope="module")
def given_options(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("resumed")
    model, data = (write_checkpoint(folder / "model"), write_problems(folder / "sums.jsonl", 50))
    return [*RESUMED, "--model", str(model), "--data", str(data)]


def kill_after(out: Path, num_lines: int, *options: str) -> None:
    """Begins an evaluation that dies with so many responses on disk, at least."""
    process, kept = start(*options, "--out", str(out), program=COMMAND), out / KEPT
    deadline = time.monotonic() + 200
    while not (kept.exists() and kept.read_bytes().count(b"\n") >= num_lines):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def without_clock(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "results.json").read_text())
    del found["seconds"], found["tokens_per_s"], found["options"]["out"]
    return found


@pytest.mark.slow  # three evaluations
def test_a_killed_evaluation_goes_on_bit_for_bit(given_options: list[str], tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(*given_options, "--out", str(whole), program=COMMAND))
    kill_after(killed, 20, *given_options)
    assert not (killed / "results.json").exists()
    before = (killed / KEPT).read_bytes().count(b"\n")
    assert 20 <= before < 100
    with (killed / KEPT).open("ab") as file:
        file.write(b'{"place": 99, "tok')  # as a kill in the middle of a write leaves it
    (killed / "completions.jsonl").write_text("{}\n")  # or one while completions are written
    output = finish(start("--resume", "--out", str(killed), program=COMMAND))
    assert f"{before} responses are there already" in output
    assert (killed / "completions.jsonl").read_bytes() == (whole / "completions.jsonl").read_bytes()
    assert without_clock(killed) == without_clock(whole)
    assert {path.name for path in killed.iterdir()} == {path.name for path in whole.iterdir()}
    assert len(completions(killed)) == 100


REWARD = ("--reward", "later.py:right", "--num_prompts", "4")


@pytest.fixture(scope="module")
def ended(given_options: list[str], tmp_path_factory) -> Path:
    """Where an evaluation has been ended by its reward."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "later.py").write_text("def right(completions, **columns): return 1 / 0")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        evaluate_here(patch, folder, *given_options, *REWARD)
    return folder


@pytest.fixture
def broken(ended: Path, tmp_path: Path) -> Path:
    """The folder of that evaluation."""
    shutil.copytree(ended, tmp_path, dirs_exist_ok=True)
    return tmp_path / "out"


def test_a_reward_that_ended_one_is_corrected_and_asked_for_what_is_there(
    broken: Path, monkeypatch, capsys
):
    """Nothing is generated again."""
    kept = [line["completion"] for line in completions(broken)]
    right = "def right(completions, **columns): return [len(text) for text in completions]"
    (broken.parent / "later.py").write_text(right)
    stream = "pat_jax.engine.session.Session.stream"
    monkeypatch.setattr(stream, lambda self, requests: iter(requests))
    evaluate_here(monkeypatch, broken.parent, "--resume", *REWARD, "--batch", "6", small=False)
    found = completions(broken)
    assert [line["completion"] for line in found] == kept and len(kept) == 8
    assert [line["reward"] for line in found] == [len(text) for text in kept]
    assert not (broken / KEPT).parent.exists()
    assert "8 responses are there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--resume --seed 1", ["option --seed is 1: expected 0 with --resume"]),
        ("--resume --data.system_prompt x", ["--data.system_prompt is 'x': expected ''"]),
        ("--resume --num_prompts 5", ["option --num_prompts is 5: expected 4"]),
        ("--resume", ["{}/out", "--resume, too", "add --reward later.py:right."]),
        ("", ["expected a new or empty folder; go on with the evaluation in it with --resume"]),
        ("--resume --out {}/none", ["'{}/none': expected the folder of an evaluation"]),
        ("--resume --out {}/done", ["'{}/done': expected an evaluation to go on with", "results"]),
    ],
)
def test_what_cannot_go_on_is_one_sentence_and_keeps_what_is_there(
    broken: Path, given_options: list[str], monkeypatch, refused, options: str, words: list[str]
):
    (broken.parent / "done").mkdir()
    (broken.parent / "done" / "results.json").write_text("{}")
    argv = options.replace("{}", str(broken.parent)).split() or given_options
    message = refused(
        lambda: evaluate_here(monkeypatch, broken.parent, *argv, small=False), kept=broken
    )
    assert all(word.replace("{}", str(broken.parent)) in message for word in words), message


def test_a_folder_is_one_evaluation_at_a_time(broken: Path, monkeypatch, capsys):
    with lock_folder(broken, "another"), pytest.raises(SystemExit):
        evaluate_here(monkeypatch, broken.parent, "--resume", *REWARD, small=False)
    assert "another process is running there" in capsys.readouterr().err
