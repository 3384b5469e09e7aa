"""A run that is killed in an iteration draws none of its responses again."""

import re
import time
from pathlib import Path

import pytest
from runs import TINY, finish, start

from pat_jax.run.checkpoints.journal import FOLDER
from pat_jax.run.logging.metrics import read_metrics

STEPS = 3
# Scores take their time, so that a kill finds some of them there and some not.
REWARD = """
import time
def slow(prompts, completions, **columns):
    time.sleep(0.3)
    return [float(len(text) % 3) for text in completions]
"""


@pytest.mark.slow
def test_its_responses_and_their_scores_are_taken_from_the_disk(tmp_path: Path):
    (tmp_path / "reward.py").write_text(REWARD)
    run, reward = tmp_path / "run", ["--reward", f"{tmp_path / 'reward.py'}:slow"]
    options = ["--run_dir", str(run), "--checkpoint.every", "1", "--steps", str(STEPS)]
    process, path = start(*TINY, *reward, *options), run / FOLDER / "iteration-1.jsonl"
    while not (path.exists() and '"function"' in path.read_text()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.kill()
    process.communicate()
    whole = path.read_text().rpartition("\n")[0].splitlines()
    responses = sum('"policy"' in line for line in whole)

    said = finish(start("--resume", *options))
    (taken,) = re.findall(r"(\d+) of \d+ responses were on disk from before", said)
    assert int(taken) == responses > 0
    metrics = [row for row in read_metrics(run / "metrics.jsonl") if "rollout/from_disk" in row]
    assert [row["rollout/from_disk"] for row in metrics] == [0, responses, 0]
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert metrics[1]["rollout/length_mean"] > 0
    assert not (run / FOLDER).exists()
