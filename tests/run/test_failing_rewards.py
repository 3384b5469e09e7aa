"""Runs whose reward functions fail, for some responses or for all; and what each of several gives."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rollouts import group_of
from runs import TINY, json_lines, run

from pat_jax.common.errors import UserError
from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.engine.record.report import RolloutReport
from pat_jax.rl.batches.types import Prompt, RolloutGroup
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.weighted_sum import FunctionScores, weighted_sum
from pat_jax.run.collect import Drawn
from pat_jax.run.learning import training_batch
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.scoring import FailedRollouts
from pat_jax.run.start.shaping import KL_OF_A_TOKEN, Shaping

REWARDS = """
def nothing_for_some(prompts, completions):
    return [None if len(text) % 3 == 0 else 1e39 if len(text) % 3 == 1 else 1.0 for text in completions]

def nothing_for_any(prompts, completions):
    if completions[0]:
        raise RuntimeError("of the user")
    return [1.0] * len(completions)
"""


def train(tmp_path: Path, reward: str, code: int = 0) -> str:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    options = ["--warm_start.steps", "0", "--reward", f"my_rewards:{reward}", "--run_dir", "here"]
    return run(*TINY, *options, cwd=tmp_path, code=code)


@pytest.mark.slow
def test_responses_without_a_reward_are_left_out_counted_and_said(tmp_path: Path):
    output = train(tmp_path, "nothing_for_some")
    rows = read_metrics(tmp_path / "here" / "metrics.jsonl")
    for row in rows[1:]:
        assert row["reward/failed"] == row["reward/failed/none"] + row["reward/failed/not_a_number"]
        assert row["reward/mean"] == 1 and row["reward/groups_without_signal"] == 1
        assert np.isfinite(row["train/loss"])
    assert rows[0]["eval/reward"] == 1 and 0 < rows[0]["eval/failed"] < 8
    assert "responses could not be scored and are left out (" in output
    assert "more than float32 holds" in (tmp_path / "here" / "run.log").read_text()


@pytest.mark.slow
def test_a_reward_that_never_works_is_an_error_with_its_traceback_in_the_log(tmp_path: Path):
    output = train(tmp_path, "nothing_for_any", code=2)
    assert "has scored none of 8 responses (8 exception)" in output
    assert 'raise RuntimeError("of the user")' in (tmp_path / "here" / "run.log").read_text()
    assert "The responses are kept in here/completions.jsonl" in output
    kept = json_lines(tmp_path / "here" / "completions.jsonl")
    assert [line["reward"] for line in kept] == [None] * 8


SEVERAL = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": solution_str.count(ground_truth[0]), "length": len(solution_str)}

def brevity(completion_ids, finish_reason, **kwargs):
    return [len(ids) if end == "length" else None for ids, end in zip(completion_ids, finish_reason)]
"""


@pytest.mark.slow  # a whole command
def test_a_run_with_several_rewards(tmp_path: Path):
    (tmp_path / "mine.py").write_text(SEVERAL)
    options = "--reward mine:compute_score mine:brevity exact --reward_weights 2 -0.5 8"
    options += " --warm_start.steps 0 --log_completions --run_dir here"
    output = run(*TINY, *options.split(), cwd=tmp_path)
    lines = json_lines(tmp_path / "here" / "completions.jsonl")
    printed = [line for line in lines if line["kind"] == "train"]
    assert len(printed) == 2 * 8
    for line in printed:
        given, is_cut = line["rewards"], line["finish"] == "length"
        assert given.keys() == {"compute_score", "brevity", "exact"}
        assert given["brevity"] == (line["tokens"] if is_cut else None)
        wanted = 2 * given["compute_score"] - 0.5 * (given["brevity"] or 0) + 8 * given["exact"]
        assert line["reward"] == wanted
    for step, row in enumerate(read_metrics(tmp_path / "here" / "metrics.jsonl")[1:], start=1):
        mine = [line for line in printed if line["step"] == step]
        assert row["reward/mean"] == pytest.approx(np.mean([line["reward"] for line in mine]))
        for name in ("compute_score", "exact"):
            mean = np.mean([line["rewards"][name] for line in mine])
            assert row[f"reward/{name}/mean"] == pytest.approx(mean)
        ended = sum(line["finish"] == "stop" for line in mine)
        assert row.get("reward/brevity/failed/none", 0) == ended and row["reward/failed"] == 0
        lengths = [len(line["completion"]) for line in mine]
        assert row["reward/compute_score/length"] == pytest.approx(np.mean(lengths))
        assert f"step {step}/2  reward {row['reward/mean']:6.3f} (compute_score " in output
        assert row["train/grad_norm"] > 0
    assert "could not be scored" not in output


def test_a_reward_may_fail_for_all_responses_of_a_few_rollouts_in_a_row():
    failure = Failure(Cause.EXCEPTION, "raised ConnectionError: the judge is down")

    def scoring(*scores: float | Failure) -> Any:
        failures = {i: one for i, one in enumerate(scores) if isinstance(one, Failure)}
        function = FunctionScores("mine:judge", "judge", 1.0, scores, [{}] * len(scores))
        return SimpleNamespace(scores=[function], failures=failures)

    failed = FailedRollouts(2)
    for one in (scoring(failure, failure), scoring(failure, failure), scoring(failure, 1.0)) * 2:
        failed.note(one)
    failed.note(scoring(failure))
    failed.note(scoring(failure))
    with pytest.raises(UserError, match=r"^3 rollouts in a row .*'mine:judge'.* judge is down"):
        failed.note(scoring(failure))


DOWN = """
from pathlib import Path

def works_at_first(prompts, completions):
    asked = Path(__file__).with_name("asked")
    count = len(asked.read_text()) if asked.exists() else 0
    asked.write_text("." * (count + 1))
    if LIMIT <= count and not Path(__file__).with_name("up").exists():
        raise ConnectionError("the judge is down")
    return [float(len(text) % 2) for text in completions]
"""


@pytest.mark.slow  # two whole commands
@pytest.mark.parametrize("others", [[], ["exact"]])
def test_a_reward_that_no_longer_works_ends_the_run_which_goes_on_when_it_does(tmp_path, others):
    asked = "9"  # a trial, and the groups of two steps
    (tmp_path / "mine.py").write_text(DOWN.replace("LIMIT", asked))
    options = ["--reward", "mine:works_at_first", *others, "--reward_workers", "1"]
    options += [
        "--warm_start.steps",
        "0",
        "--steps",
        "30",
        "--eval.every",
        "0",
        "--run_dir",
        "here",
    ]
    output = run(*TINY, *options, cwd=tmp_path, code=2)
    (error,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert "mine:works_at_first" in error and "the judge is down" in error
    rows = read_metrics(tmp_path / "here" / "metrics.jsonl")
    failed = [row["reward/failed"] for row in rows]
    assert failed == [0, 0, *[8] * 8]
    (tmp_path / "up").touch()
    last = rows[-1]["step"]
    again = ["--resume", "--steps", str(last + 1)]
    output = run(*TINY, *options, *again, cwd=tmp_path)
    assert f"resumed after step {last}" in output
    assert f"rewards failed in 8 of {last + 1} steps" in output


GROUPS, SAMPLES = 3, 4
DRAWS = np.random.default_rng(0)
SCORES = np.stack([DRAWS.random((GROUPS, SAMPLES)), 50 * DRAWS.random((GROUPS, SAMPLES))])
WEIGHTS = (2.0, 0.5)
NONE = Failure(Cause.NONE, "does not apply")


def groups() -> list[RolloutGroup]:
    prompts = [Prompt(number, (1, 2), "", {}) for number in range(GROUPS)]
    return [group_of([range(1 + i) for i in range(SAMPLES)], prompt) for prompt in prompts]


def drawn_with(*scores: Any, weights=WEIGHTS) -> Drawn:
    """A batch as the scorer makes it, from lists of scores and failures."""
    rows = [[x for group in one for x in group] for one in scores]
    functions = [
        FunctionScores(f"f{i}", f"f{i}", weight, row, [{}] * len(row))
        for i, (weight, row) in enumerate(zip(weights, rows, strict=True))
    ]
    rewards, failures = weighted_sum(functions)
    shaped = rewards.reshape(GROUPS, SAMPLES)
    return Drawn(groups(), RolloutReport(), shaped, failures, functions, 0.0)


def advantages(drawn: Drawn, name: str = "grpo", **options: Any) -> np.ndarray:
    """The advantage of each response: the same at all of its tokens."""
    algorithm = AlgorithmConfig(mini_batch_size=GROUPS, **ALGORITHMS[name], **options)
    batch, _ = training_batch(
        algorithm,
        drawn.scored,
        drawn.rewards,
        lambda batch: batch,
        beta=0.0,
        micro_shapes=[(4, 16)],
        longest=8,
    )
    found = batch.by_response("advantages")
    for each in found:
        np.testing.assert_array_equal(each, each[0])
    return np.array([each[0] for each in found]).reshape(GROUPS, SAMPLES)


def compared(rewards: np.ndarray) -> np.ndarray:
    """GRPO's advantages, arXiv 2402.03300."""
    centred = rewards - np.nanmean(rewards, axis=1, keepdims=True)
    return centred / (np.nanstd(rewards, axis=1, ddof=1, keepdims=True) + 1e-6)


def test_gdpo_compares_each_function_and_then_normalises_the_sum():
    found = advantages(drawn_with(*SCORES.tolist()), name="gdpo")
    total = WEIGHTS[0] * compared(SCORES[0]) + WEIGHTS[1] * compared(SCORES[1])
    expected = (total - total.mean()) / total.std(ddof=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    plain = advantages(drawn_with(*SCORES.tolist()))
    np.testing.assert_allclose(plain, compared(2 * SCORES[0] + 0.5 * SCORES[1]), rtol=1e-4)
    assert np.abs(plain - found).max() > 0.1


def test_what_has_no_reward_counts_in_no_function_and_what_does_not_apply_in_its_own():
    first, second = SCORES.tolist()
    first[0][1], second[2][3] = Failure(Cause.NOT_A_NUMBER, "broke"), NONE
    found = advantages(drawn_with(first, second), name="gdpo")
    by_hand = SCORES.copy()
    by_hand[:, 0, 1], by_hand[1, 2, 3] = np.nan, np.nan
    total = np.nansum([w * compared(x) for w, x in zip(WEIGHTS, by_hand, strict=True)], axis=0)
    total[0, 1] = np.nan
    expected = (total - np.nanmean(total)) / np.nanstd(total, ddof=1)
    np.testing.assert_allclose(found, np.nan_to_num(expected), rtol=1e-5, atol=1e-6)


def test_a_group_teaches_gdpo_if_one_function_tells_its_responses_apart():
    opposed, same = [0.0, 1.0, 0.0, 1.0], [1.0] * SAMPLES
    turned = [1 - x for x in opposed]
    scores = drawn_with([opposed, same, same], [turned, same, opposed], weights=(1.0, 1.0))
    assert scores.scored.by_function.has_signal.tolist() == [True, False, True]
    only_measured = drawn_with([same] * 3, [opposed] * 3, weights=(1.0, 0.0))
    assert only_measured.scored.by_function.has_signal.tolist() == [False] * 3
    assert advantages(scores, name="gdpo")[1].tolist() == [0.0] * SAMPLES


def options(beta: float = 0.1, target: float = 0.5) -> AlgorithmConfig:
    parts = {**ALGORITHMS["ppo"], **({"kl_horizon": 100} if target else {})}
    return AlgorithmConfig(name="ppo", beta=beta, kl_target=target, **parts)


@pytest.mark.parametrize(
    ("resumed", "expected"),
    [
        (options(), 0.1 * 1.02),
        (options(beta=0.3), 0.3),  # another weight is asked for
        (options(target=0.0), 0.1),  # a weight that stays
    ],
)
def test_the_weight_of_the_penalty_goes_on_if_its_option_is_the_same(resumed, expected):
    shaping = Shaping.of(options(), {}).after({KL_OF_A_TOKEN: 9.0}, 10)
    meta = json.loads(json.dumps(shaping.to_meta()))
    again = Shaping.of(resumed, meta)
    assert again.kl.beta == pytest.approx(expected, rel=1e-12)
    # It is still the weight of a run that is resumed once more.
    assert Shaping.of(resumed, again.to_meta()) == again
