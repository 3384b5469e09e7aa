"""Rows and a loss that a program gives to a run of two processes: one file of each, which both read."""

import json
from pathlib import Path

import pytest
from runs import SMALL_ROLLOUT, write_checkpoint
from several import ends, errors, start_all

from pat_jax.run.files.folder import CONFIG_FILE, ROWS
from pat_jax.run.logging.metrics import read_metrics

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
PROGRAM = """
import sys
from dataclasses import dataclass
import pat_jax
from pat_jax.rl.algorithm.policy_loss import PolicyLoss

@dataclass(frozen=True)
class Mine(PolicyLoss):
    is_on_policy: bool = True

count, *words = sys.argv[1:]
options = dict(zip([word[2:] for word in words[::2]], words[1::2]))
rows = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(60)]
more = int(count) * int(options["distributed.process_id"])
try:
    pat_jax.train(options, data=rows + rows[:more], eval={"data": rows[:9]}, loss=Mine())
except pat_jax.UserError as error:
    sys.exit(f"error: {error}")
"""


def train(folder: Path, more: int) -> list[tuple[int, str]]:
    if not (folder / "model").exists():
        write_checkpoint(folder / "model")
    options = [*SMALL_ROLLOUT, "--warm_start.steps", "0", "--rollout.max_prompt_length", "120"]
    options += ["--steps", "1", "--devices", "4", "--layout", "dp4tp1"]
    options += ["--model", str(folder / "model"), "--run_dir", str(folder / "run")]
    return ends(start_all(2, str(more), *options, program=("-c", PROGRAM)))


def test_two_processes_read_one_file(tmp_path: Path):
    found = train(tmp_path, 3)
    assert [code for code, _ in found] == [1, 1], found
    assert "started with other options than process 0 (--data.files" in found[0][1]
    assert len(errors(found[0][1])) == 1 and not (tmp_path / "run").exists()
    for code, generated in train(tmp_path, 0):
        assert code == 0, generated
    assert ".loss:Mine" in (tmp_path / "run" / CONFIG_FILE).read_text()
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 1
    rows, heldout = sorted((tmp_path / "run" / ROWS).glob("*/*.jsonl"), key=lambda path: path.name)
    counts = [
        len([json.loads(x) for x in path.read_text().splitlines()]) for path in (rows, heldout)
    ]
    assert counts == [60, 9]
