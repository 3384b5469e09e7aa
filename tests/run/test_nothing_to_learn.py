"""A step of which nothing is learned says so, and means of nothing are shown nowhere."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import TINY, json_lines, run

from pat_jax.config.run import RolloutConfig, RunConfig
from pat_jax.engine.record.report import RolloutReport
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.run.learning import nothing_to_learn

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
NAN = float("nan")


def groups_of(*finishes: FinishReason) -> list[RolloutGroup]:
    prompt = Prompt(0, (1,), "p", {})
    empty = np.zeros(2, np.float32)
    rollouts = [Rollout(prompt, i, np.ones(2, int), empty, end) for i, end in enumerate(finishes)]
    return [RolloutGroup(prompt, rollouts)]


@pytest.mark.parametrize(
    ("truncated", "finishes", "rewards", "words"),
    [
        ("mask", (LENGTH, LENGTH), (0.0, 1.0), "all 2 responses of this step were cut off at"),
        ("mask", (LENGTH, STOP), (0.0, NAN), "all 2 responses of this step, but for 1 that have"),
        ("score", (STOP, LENGTH), (NAN, NAN), "none of the 2 responses of this step has a reward"),
        ("mask", (LENGTH, STOP), (0.0, 1.0), ""),
        ("score", (LENGTH, LENGTH), (0.0, 1.0), ""),
    ],
)
def test_a_step_of_which_nothing_is_learned_says_why(truncated, finishes, rewards, words):
    config = RunConfig(rollout=RolloutConfig(max_completion_length=160))
    config = replace(config, algorithm=replace(config.algorithm, truncated=truncated))
    found = nothing_to_learn(config, groups_of(*finishes), np.array([rewards]))
    assert found.startswith(words) and bool(found) == bool(words)
    is_cut = LENGTH in finishes and "masked" in found
    assert ("--rollout.max_completion_length" in found) == is_cut


def test_a_rollout_that_generated_nothing_has_no_shares():
    report = RolloutReport()
    for name in ("tokens_per_s", "tokens_per_row_step", "row_occupancy", "prefill_padding"):
        assert math.isnan(getattr(report, name)), name
    assert math.isnan(report.kv_waste) and math.isnan(report.balance_share)


@pytest.mark.slow
def test_a_run_whose_responses_are_all_masked(tmp_path: Path):
    options = ["--algorithm.truncated", "mask", "--rollout.max_completion_length", "2"]
    output = run(*TINY, *options, "--warm_start.steps", "0", "--run_dir", str(tmp_path / "run"))
    lines = [x for x in output.splitlines() if "were cut off at 2 tokens and are masked" in x]
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2"]
    assert "NaN or Inf" not in output and " nan" not in output
    learned = [row for row in json_lines(tmp_path / "run/metrics.jsonl") if "train/loss" in row]
    names = ("loss", "entropy", "cross_entropy", "behavior_gap_max", "ratio_min", "grad_norm")
    assert [[row[f"train/{name}"] for name in names] for row in learned] == [[None] * 6] * 2
