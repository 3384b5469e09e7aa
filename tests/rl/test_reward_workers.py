import contextlib
import logging
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from processes import children_of, is_running

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.rewards.responses import Response, trial_responses
from pat_jax.rl.rewards.scorer import RewardScorer

ROOT = Path(__file__).parents[2]

# What each response makes of the function that scores it is written in the response.
FUNCTIONS = """
import ctypes, os, sys, time
from helper import ONE

def obey(prompts, completions, **columns):
    for completion in completions:
        if completion == "hang":
            time.sleep(1000)
        if completion.startswith("raise"):
            raise KeyError(completion)
        if completion == "exit":
            sys.exit(3)
        if completion == "interrupt":
            raise KeyboardInterrupt
        if completion == "die":
            os._exit(3)
        if completion == "segfault":
            ctypes.string_at(0)
        if completion == "hoard":
            bytearray(2**30)
        time.sleep(float(completion.partition("sleep ")[2] or 0))
    return [ONE * len(completions)] * len(completions)

def result(prompts, completions, value, **columns):
    return value[0]

def modules(prompts, completions, **columns):
    heavy = {"jax", "transformers", "sentinel"} & set(sys.modules)
    assert not heavy, heavy
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    return [1.0] * len(prompts)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "helper.py").write_text("ONE = 1")
    path = folder / "user_rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture(scope="module")
def obey(functions):
    with RewardScorer(f"{functions}:obey", timeout=2.0, memory=0.5) as scorer:
        scorer.score(["p"], ["fine"], {})
        yield scorer


def test_the_scorer_refuses_a_module_that_kills_its_process(tmp_path):
    path = tmp_path / "fatal_rewards.py"
    path.write_text("import os; os._exit(1)")
    with pytest.raises(UserError, match="ended its process with code 1 while it was imported"):
        RewardScorer(f"{path}:f", timeout=1.0)


@pytest.mark.parametrize(
    ("culprit", "reason"),
    [
        ("hang", "took longer than 2 s and was killed"),
        ("exit", "raised SystemExit: 3"),
        ("interrupt", "raised KeyboardInterrupt"),
        ("die", "ended its process with code 3"),
        ("segfault", "ended its process with SIGSEGV"),
        ("hoard", "raised MemoryError (--reward_memory is what it may have)"),
    ],
)
def test_only_the_culprit_is_left_out_and_it_is_logged(obey, caplog, culprit, reason):
    with caplog.at_level(logging.WARNING):
        scores = obey.score(["p", "p", "q"], ["fine", culprit, "fine"], {})
    np.testing.assert_array_equal(scores, [1, np.nan, 1])
    message = caplog.records[0].getMessage()
    assert reason in message
    assert f"completion '{culprit}', prompt 'p'" in message


def test_a_slow_group_has_the_time_of_all_its_responses(obey, caplog):
    scores = obey.score(["p"] * 3, ["sleep 0.8"] * 3, {})
    assert scores.tolist() == [3, 3, 3]  # as a group: nothing was scored again
    assert not caplog.records


def test_a_pathological_answer_costs_only_its_own_reward():
    tower = r"\boxed{9^{9^{9^{9}}}}"
    with RewardScorer("math_lenient", timeout=3.0) as scorer:
        start = time.monotonic()
        scores = scorer.score(
            ["p"] * 3, [r"\boxed{\frac12}", tower, "0.50"], {"answer": ["0.5"] * 3}
        )
    np.testing.assert_array_equal(scores, [1, np.nan, 1])
    assert time.monotonic() - start < 30


@pytest.fixture(scope="module")
def result(functions):
    with RewardScorer(f"{functions}:result", timeout=5.0) as scorer:
        scorer.score(["p"], ["a"], {"value": [[1.0]]})
        yield scorer


def test_what_is_no_reward_costs_its_response_only_and_every_kind_of_numbers_is_one(result, caplog):
    for value, failed, message in (
        ([], [0, 1], "returned 0 values where a list of 1 numbers"),
        ([1.0, 2.0, 3.0], [0, 1], "returned 3 values"),
        (1.0, [0, 1], "returned 1.0 where a list"),
        (None, [0, 1], "returned None where a list"),
        ("ab", [0, 1], "returned 'ab' where a list"),
        ([1.0, float("nan")], [1], "returned nan"),
        ([float("inf"), 1.0], [0], "returned inf"),
        ([1.0, -1e39], [1], "returned -1e+39, more than float32 holds"),
        ([-(10**5000), 1.0], [0], "returned -inf, more than float32 holds"),
        ([[[10**5000]], 1.0], [0], "returned an integer of thousands of digits"),
        ([1.0, None], [1], "returned None"),
        (["1", 1.0], [0], "returned '1'"),
    ):
        caplog.clear()
        scores = result.score(["p", "p"], ["a", "b"], {"value": [value, value]})
        assert np.flatnonzero(np.isnan(scores)).tolist() == failed
        assert message in caplog.records[0].getMessage()
    for value in ([True, False], np.array([1, 0], np.float32), (1, 0), list(np.array([1, 0]))):
        assert result.score(["p", "p"], ["a", "b"], {"value": [value, value]}).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "2 exception.* it raised KeyError: 'raise'"),
        ("die", "2 crashed.* it ended its process with code 3"),
    ],
)
def test_a_function_that_never_works_is_an_error_until_it_once_did(functions, text, message):
    with RewardScorer(f"{functions}:obey", timeout=2.0) as scorer:
        with pytest.raises(UserError, match=f"has scored none of 2 responses .{message}"):
            scorer.score(["p", "q"], [text, text], {})
        assert scorer.score(["p"], ["fine"], {}).tolist() == [1]
        assert np.isnan(scorer.score(["p", "q"], [text, text], {})).all()


def test_the_users_traceback_is_logged_once(obey, caplog):
    obey.score(["p", "q", "r"], ["fine", "raise", "raise 2"], {})
    logged = [record.getMessage() for record in caplog.records]
    [found] = [text for text in logged if "Traceback" in text]
    assert "user_rewards.py" in found and "raise KeyError(completion)" in found
    assert "rewards/process.py" not in found and len(logged) == 3


def test_workers_run_neither_the_command_nor_jax(functions, tmp_path):
    (tmp_path / "sentinel.py").write_text("")
    command = tmp_path / "command.py"
    command.write_text(
        "import sentinel\n"
        "from pat_jax.rl.rewards.scorer import RewardScorer\n"
        "if __name__ == '__main__':\n"
        f"    with RewardScorer({f'{functions}:modules'!r}, timeout=10) as scorer:\n"
        "        print(scorer.score(['p'], ['c'], {}).tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, str(command)],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[1.0]", done.stderr


def trial(**columns: object) -> list[Response]:
    return trial_responses(Prompt(0, (1,), "p", columns), sorted(columns))


@pytest.mark.parametrize(
    ("code", "columns", "message"),
    [
        ("def f(prompts, completions, answr): ...", {"answer": "1"}, "be called .*'answr'.*finish"),
        ("def f(completions, value): return value[0]", {"value": [1.0]}, "a list of 2 numbers"),
        ("def f(completions, answer): return [1.0, None]", {"answer": "1"}, ""),
        ("def f(completions): return [c for c in completion]", {}, "NameError: .*correct the func"),
        ("def f(completions): return __import__('absent')", {}, "Error: .*correct the function"),
    ],
)
def test_a_function_that_cannot_work_is_found_when_it_is_tried_out(
    tmp_path, code, columns, message
):
    (tmp_path / "tried.py").write_text(code)
    refused = pytest.raises(UserError, match=message) if message else contextlib.nullcontext()
    with RewardScorer(f"{tmp_path}/tried.py:f", timeout=5.0) as scorer, refused:
        assert scorer.try_out(trial(**columns), 2) == []


def test_a_function_that_raises_when_it_is_tried_out_may_still_work(functions, caplog):
    path = functions.parent / "picky.py"
    path.write_text("import json\ndef f(completions): return [json.loads(c) for c in completions]")
    with RewardScorer(f"{path}:f", timeout=5.0) as scorer:
        [note] = scorer.try_out(trial(), 2)
        assert "raised json.decoder.JSONDecodeError" in note and "if it never scores" in note
        assert "Traceback" in caplog.text
        assert scorer.score(["p"], ["7"], {}).tolist() == [7]


# --- what is left of processes and their children, however they end: nothing ------------------------


FUNCTION = """
import subprocess, time

def leave_children(prompts, completions, path):
    children = [subprocess.Popen(["sleep", "1000"]) for _ in completions]
    with open(path[0], "w") as file:
        file.write(" ".join(str(child.pid) for child in children))
    if "hang" in completions:
        time.sleep(1000)
    return [1.0] * len(prompts)
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "user_rewards.py").write_text(FUNCTION)
    return f"{tmp_path / 'user_rewards.py'}:leave_children"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("last", ["hang", "fine"])
def test_children_of_a_worker_die_with_it(spec, tmp_path, last):
    path = tmp_path / "pids"
    with RewardScorer(spec, timeout=3.0) as scorer:
        scorer.score(["p"], ["fine"], {"path": [str(path)]})
        if last == "hang":
            scorer.score(["p"], ["hang"], {"path": [str(path)]})
            assert_all_end(path)
    assert_all_end(path)


@pytest.mark.timeout(60)
def test_a_worker_dies_with_a_trainer_that_is_killed(spec, tmp_path):
    path = tmp_path / "pids"
    code = (
        "from pat_jax.rl.rewards.scorer import RewardScorer\n"
        f"with RewardScorer({spec!r}, timeout=1000) as scorer:\n"
        f"    scorer.score(['p'], ['hang'], {{'path': [{str(path)!r}]}})\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not (path.exists() and path.read_text()):
        time.sleep(0.01)
    [worker] = children_of(trainer.pid)
    trainer.kill()
    trainer.wait()
    assert_all_end(path)
    while is_running(worker):
        time.sleep(0.01)


def assert_all_end(path: Path) -> None:
    for pid in path.read_text().split():
        while is_running(int(pid)):
            time.sleep(0.01)
