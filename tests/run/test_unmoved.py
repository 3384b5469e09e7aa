"""A run in which nothing moves says so once; a step of which nothing is learned says so, and means of nothing
are shown nowhere."""

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from rollouts import PROMPT, response
from runs import TINY, json_lines, run

from pat_jax.config.learning import AlgorithmConfig
from pat_jax.engine.record.report import RolloutReport
from pat_jax.rl.batches.types import FinishReason, RolloutGroup
from pat_jax.rl.rewards.weighted_sum import ScoresByFunction
from pat_jax.run.collect import ScoredGroups
from pat_jax.run.learning import nothing_to_learn
from pat_jax.run.logging.progress import summarize
from pat_jax.run.logging.unmoved import (
    CUT,
    GRADIENT,
    LENGTH,
    REWARD,
    SPREAD,
    STEPS,
    Unmoved,
    advice,
    advice_on_length,
)

NAN = float("nan")
STILL: dict[str, float | None] = {REWARD: 0.0, LENGTH: 56.0, GRADIENT: 0.3}


def rows(count: int = STEPS, **last: float | None) -> list[dict[str, float | None]]:
    """Alike, but for the last."""
    names = {"reward": REWARD, "length": LENGTH, "gradient": GRADIENT}
    return [*[STILL] * (count - 1), STILL | {names[key]: value for key, value in last.items()}]


def test_reward_and_length_that_do_not_move_are_said():
    found = advice(rows())
    assert "reward (0) and mean response length (56) were the same" in found and "\n" not in found
    assert advice(rows(reward=1e-10)) and advice([{REWARD: 1.0}, *rows()])


def test_that_nothing_was_rewarded_is_said_by_itself_and_at_the_end():
    row = {REWARD: 0.0, SPREAD: 0.0, GRADIENT: 0.0, LENGTH: 56.0}
    assert advice([row] * STEPS).startswith("nothing was rewarded in the last 10 steps")
    assert "rewarded" not in advice([*[row] * (STEPS - 1), row | {SPREAD: 0.1}])
    steps = [row | {"step": step, "timing/rollout": 1.0} for step in range(1, 4)]
    assert "nothing was rewarded in 3 steps" in summarize(steps)
    assert "rewarded" not in summarize([*steps, row | {"step": 4, REWARD: 0.1, SPREAD: 0.3}])


@pytest.mark.parametrize(
    "moved",
    [
        rows(STEPS - 1),
        [],
        rows(reward=1e-6),
        rows(length=56.5),
        rows(reward=NAN),
        [{REWARD: 0.0, LENGTH: 56.0}] * STEPS,  # it only generates
        [*[STILL | {GRADIENT: 0.0}] * (STEPS - 1), {REWARD: 1.0, LENGTH: 5.0, GRADIENT: 1e-12}],
    ],
)
def test_where_anything_moves_nothing_is_said(moved):
    assert advice(moved) == ""


@pytest.mark.parametrize("gradient", [0.0, NAN, None])
def test_a_gradient_that_is_never_there_is_said(gradient: float | None):
    found = advice([{REWARD: i, LENGTH: i, GRADIENT: gradient} for i in range(STEPS)])
    assert found.startswith("the gradient of the last 10 steps was 0 or none: nothing is learned")


@pytest.mark.parametrize("share", [0.2, NAN, None])
def test_few_that_are_cut_need_no_advice(share: float | None):
    assert advice_on_length({CUT: share}, 160) == "" == advice_on_length({}, 160)


def test_many_that_are_cut_in_the_first_step_are_said_once(caplog):
    printed: list[str] = []
    unmoved, late = Unmoved(printed.append, 1600), Unmoved(printed.append, 1600)
    with caplog.at_level(logging.WARNING):
        for step, share in ((7, 0.43), (8, 0.9)):
            unmoved.note(step, {CUT: share})
            late.note(step, {CUT: share - 0.3})
    (line,) = printed
    assert line.startswith(
        "step 7: 43 % of the responses were cut at 1,600 tokens (--rollout.max_completion_length); "
    )
    assert [record.getMessage() for record in caplog.records] == printed


STOP, CUT_OFF = FinishReason.STOP, FinishReason.LENGTH


def groups_of(*finishes: FinishReason) -> list[RolloutGroup]:
    rollouts = [response([1, 1], sample=i, finish=end) for i, end in enumerate(finishes)]
    return [RolloutGroup(PROMPT, rollouts)]


@pytest.mark.parametrize(
    ("truncated", "finishes", "rewards", "words"),
    [
        ("mask", (CUT_OFF, CUT_OFF), (0.0, 1.0), "all 2 responses of this step were cut off at"),
        ("mask", (CUT_OFF, STOP), (0.0, NAN), "all 2 responses of this step, except 1 without"),
        ("score", (STOP, CUT_OFF), (NAN, NAN), "none of the 2 responses of this step has a reward"),
        ("mask", (CUT_OFF, STOP), (0.0, 1.0), ""),
        ("score", (CUT_OFF, CUT_OFF), (0.0, 1.0), ""),
    ],
)
def test_a_step_of_which_nothing_is_learned_says_why(truncated, finishes, rewards, words):
    by_function = ScoresByFunction(np.array([[rewards]]), (1.0,))
    scored = ScoredGroups(groups_of(*finishes), np.array([rewards]), by_function, {})
    found = nothing_to_learn(AlgorithmConfig(truncated=truncated), scored, 160)
    assert found.startswith(words) and bool(found) == bool(words)
    is_cut = CUT_OFF in finishes and "masked" in found
    assert ("--rollout.max_completion_length" in found) == is_cut


def test_a_rollout_that_generated_nothing_has_no_shares():
    report = RolloutReport()
    for name in ("tokens_per_s", "tokens_per_row_step", "row_occupancy", "prefill_padding"):
        assert math.isnan(getattr(report, name)), name
    assert math.isnan(report.kv_waste) and math.isnan(report.balance_share)


@pytest.mark.slow
def test_a_run_that_learns_nothing(tmp_path: Path):
    """All rewards are the same; of the first steps all responses are masked, of later ones some."""
    reward = "def same(completions, **_):\n    return [1] * len(completions)\n"
    (tmp_path / "same.py").write_text(reward)
    options = ["--algorithm.truncated", "mask", "--rollout.max_completion_length", "2"]
    options += ["--reward", f"{tmp_path}/same.py:same"]
    options += ["--warm_start.steps", "0", "--steps", "12", "--eval.every", "0"]
    output = run(*TINY, *options, "--run_dir", str(tmp_path / "run"))
    lines = [x for x in output.splitlines() if "were cut off at 2 tokens and are masked" in x]
    assert [line.split(":")[0] for line in lines[:2]] == ["step 1", "step 2"]
    (printed,) = (line for line in output.splitlines() if "0 or none: nothing is learned" in line)
    assert printed.startswith("step 10: the gradient")
    assert (tmp_path / "run" / "run.log").read_text().count("0 or none: nothing is learned") == 1
    assert "NaN or Inf" not in output and " nan" not in output
    learned = [row for row in json_lines(tmp_path / "run/metrics.jsonl") if "train/loss" in row]
    names = ("loss", "entropy", "cross_entropy", "behavior_gap_max", "ratio_min", "grad_norm")
    assert [[row[f"train/{name}"] for name in names] for row in learned[:2]] == [[None] * 6] * 2
