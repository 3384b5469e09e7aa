"""What is left of reward processes and their children, however they end: nothing."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import children_of, is_running

from pat_jax.rl.rewards.scorer import RewardScorer

ROOT = Path(__file__).parents[2]

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
