"""A full disk costs a run's logs nothing but time: what it does not take is written later."""

import glob
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboardX.proto import event_pb2

from pat_jax.common import patterns
from pat_jax.common.errors import UserError
from pat_jax.common.patterns import matches
from pat_jax.run.logging.metrics import read_metrics

ROOT = Path(__file__).parents[2]

# Writes 300 times, and for a while to a disk that is full.
FULL = """
import logging, resource, signal, sys
from pathlib import Path
import numpy as np
from pat_jax.run.logging.completions import Completions
from pat_jax.run.logging.metrics import MetricsWriter
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout

logging.getLogger("pat_jax").addHandler(logging.NullHandler())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
tokens, numbers = np.array(TOKENIZER.encode("3"), np.int32), np.zeros(1, np.float32)
said = [Rollout(Prompt(0, (1,), "1+2=", {}), 0, tokens, numbers, FinishReason.LENGTH)]
with MetricsWriter(folder) as writer, Completions(TOKENIZER, folder, is_asked=True) as completions:
    for step in range(300):
        size = 2_000 if 20 <= step < 200 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        writer.write(step, {"reward/mean": float(step)})
        writer.flush()
        completions.write(step, "train", said, numbers)
"""


def test_metrics_and_responses_survive_a_full_disk(tmp_path: Path):
    path = tmp_path / "completions.jsonl"
    path.write_text('{"step": 0, "ki')  # as where a run was killed
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["reward/mean"] for row in rows] == list(range(300))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()[1:]] == [*range(300)]

    (events,) = (tmp_path / "tensorboard").iterdir()
    content, steps = events.read_bytes(), []
    while content:  # records: length, its checksum, an event, its checksum
        size = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + size])  # pyright: ignore[reportAttributeAccessIssue]  # generated
        steps += [event.step] if event.HasField("summary") else []
        content = content[16 + size :]
    assert sorted(steps) == list(range(300))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("a.json", "b.json", "in/c.json", "in/deep/d.json", ".hidden/e.json", "é [1].json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "pattern", ["*.json", "**/*.json", "in/**", "[ab].json", "?.json", "nothing*", "é*", "**", "["]
)
def test_they_are_those_of_glob(tree, pattern: str):
    assert matches(pattern, "data") == sorted(glob.glob(pattern, recursive=True))
    whole = f"{tree}/{pattern}"
    assert matches(whole, "data") == sorted(glob.glob(whole, recursive=True))


def test_a_pattern_that_no_path_fits_finds_nothing(tree):
    assert matches(f"{'x' * 300}*", "data") == []


def test_the_whole_machine_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.3)
    with pytest.raises(
        UserError, match=r"option --data is '/\*\*/no\*such': .* looking took 0.3 s"
    ):
        matches("/**/no*such", "data")


def test_more_files_than_a_run_reads(tree, monkeypatch):
    monkeypatch.setattr(patterns, "MOST_FILES", 2)
    with pytest.raises(UserError, match="more than 2 files"):
        matches("**", "eval.data")
