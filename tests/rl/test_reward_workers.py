import logging
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pat_jax.errors import UserError
from pat_jax.rl.reward_scorer import RewardScorer

ROOT = Path(__file__).parents[2]

# What each response makes of the function that scores it is written in the response.
FUNCTIONS = """
import os, sys, time
from helper import ONE

def obey(prompts, completions, **columns):
    for completion in completions:
        if completion == "hang":
            while True:
                pass
        if completion == "raise":
            raise KeyError(completion)
        if completion == "exit":
            sys.exit(3)
        if completion == "die":
            os._exit(3)
        time.sleep(float(completion.partition("sleep ")[2] or 0))
    return [ONE * len(completions)] * len(completions)

def answers(prompts, completions, answer, **columns):
    return [float(a == c) for a, c in zip(answer, completions)]

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
    with RewardScorer(f"{functions}:obey", timeout=0.4) as scorer:
        yield scorer


def test_the_scorer_refuses_a_wrong_name_at_its_start():
    with pytest.raises(UserError, match="there is no module 'no_such_module'"):
        RewardScorer("no_such_module:f", timeout=1.0)


def test_the_scorer_refuses_a_module_that_kills_its_process(tmp_path):
    path = tmp_path / "fatal_rewards.py"
    path.write_text("import os; os._exit(1)")
    with pytest.raises(UserError, match="ended its process while it was imported"):
        RewardScorer(f"{path}:f", timeout=1.0)


def test_a_function_sees_its_group(obey):
    scores = obey.score(["p", "p", "q"], ["a", "b", "c"], {})
    assert scores.dtype == np.float32
    assert scores.tolist() == [2, 2, 1]


@pytest.mark.parametrize(
    ("culprit", "reason"),
    [
        ("hang", "took longer than 0.4 s and was killed"),
        ("raise", r"raised KeyError \('raise'\)"),
        ("exit", "raised SystemExit"),
        ("die", "ended its process with code 3"),
    ],
)
def test_only_the_culprit_gets_zero_and_it_is_logged(obey, caplog, culprit, reason):
    with caplog.at_level(logging.WARNING):
        scores = obey.score(["p", "p", "q"], ["fine", culprit, "fine"], {})
    assert scores.tolist() == [1, 0, 1]
    [record] = caplog.records
    message = record.getMessage()
    assert reason.replace("\\", "") in message
    assert f"completion '{culprit}', prompt 'p'" in message


def test_a_slow_group_has_the_time_of_all_its_responses(obey, caplog):
    scores = obey.score(["p"] * 3, ["sleep 0.25"] * 3, {})
    assert scores.tolist() == [3, 3, 3]  # as a group: nothing was scored again
    assert not caplog.records


def test_a_pathological_answer_costs_only_its_own_reward():
    tower = r"\boxed{9^{9^{9^{9}}}}"
    with RewardScorer("math", timeout=1.5) as scorer:
        start = time.monotonic()
        scores = scorer.score(
            ["p"] * 3, [r"\boxed{\frac12}", tower, "0.50"], {"answer": ["0.5"] * 3}
        )
    assert scores.tolist() == [1, 0, 1]
    assert time.monotonic() - start < 30


def test_columns_reach_the_function(functions):
    with RewardScorer(f"{functions}:answers", timeout=5.0, num_workers=2) as scorer:
        texts = [str(index % 7) for index in range(40)]
        columns = {"answer": ["3"] * 40, "unused": list(range(40))}
        scores = scorer.score([str(index // 4) for index in range(40)], texts, columns)
    assert scores.tolist() == [float(text == "3") for text in texts]


@pytest.fixture(scope="module")
def result(functions):
    with RewardScorer(f"{functions}:result", timeout=5.0) as scorer:
        yield scorer


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "returned 1 values: expected a list of 2 finite numbers"),
        ([1.0, 2.0, 3.0], "returned 3 values"),
        ([1.0, float("nan")], "returned nan for response 1"),
        ([float("inf"), 1.0], "returned inf for response 0"),
        ([1.0, None], "returned None for response 1"),
        (["1", "2"], "returned '1' for response 0"),
        (1.0, "returned 1.0: expected a list"),
        (None, "returned None: expected a list"),
        ("ab", "returned 'ab': expected a list"),
    ],
)
def test_a_result_that_is_no_list_of_rewards(result, value, message):
    with pytest.raises(UserError, match=message):
        result.score(["p", "p"], ["a", "b"], {"value": [value, value]})


@pytest.mark.parametrize("value", [[1, 0], [True, False], np.array([1.0, 0.0], np.float32), (1, 0)])
def test_every_kind_of_numbers_is_a_result(result, value):
    assert result.score(["p", "p"], ["a", "b"], {"value": [value, value]}).tolist() == [1, 0]


def test_a_function_that_raises_for_everything_is_an_error_until_it_once_worked(functions):
    with RewardScorer(f"{functions}:answers", timeout=5.0) as scorer:
        with pytest.raises(UserError, match=r"raised TypeError .*'answer'.* every response so far"):
            scorer.score(["p", "q"], ["a", "b"], {})
        assert scorer.score(["p"], ["a"], {"answer": ["a"]}).tolist() == [1]
        assert scorer.score(["p", "q"], ["a", "b"], {}).tolist() == [0, 0]


def test_lists_of_different_lengths_are_refused(obey):
    with pytest.raises(ValueError, match="2 prompts, but 1 values of 'answer'"):
        obey.score(["p", "q"], ["a", "b"], {"answer": ["a"]})


def test_workers_run_neither_the_command_nor_jax(functions, tmp_path):
    (tmp_path / "sentinel.py").write_text("")
    command = tmp_path / "command.py"
    command.write_text(
        "import sentinel\n"
        "from pat_jax.rl.reward_scorer import RewardScorer\n"
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
