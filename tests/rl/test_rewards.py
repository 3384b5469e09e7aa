import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.rewards.built_in import exact_reward, math_lenient_reward, math_reward
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.report import describe_rewards, mean_reward
from pat_jax.rl.rewards.responses import Response, response_reader
from pat_jax.rl.rewards.rewards import resolve_reward
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.rl.rewards.weighted_sum import FunctionScores, weighted_sum

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


# --- built-in functions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "finish", "expected"),
    [
        ("b3+8=1;#4", STOP, 1),
        ("#3;#4", STOP, 1),  # the last one counts
        ("#4;#3", STOP, 0),
        ("#4", LENGTH, 0),  # it had not ended
        *((text, STOP, 0) for text in ("#44", "#4 ", "#", "4", "")),
    ],
)
def test_exact(completion, finish, expected):
    assert exact_reward(["p"], [completion], answer=["4"], finish_reason=[finish]) == [expected]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"\boxed{4} no, \boxed{5}", "5", 1),  # the last one counts
        (r"\boxed{5} no, \boxed{4}", "5", 0),
        (r"\boxed{5}, unlike 7", "5", 1),  # a box wins over a later number
        (r"\boxed{\frac{1}{2}}", r"\frac{2}{4}", 1),
        ("the answer is 1,234,567.", "1234567", 1),
        ("3/4 of it", "0.75", 1),
        ("so .5", "1/2", 1),
        ("it is -5", "-5", 1),
        ("as 10-5 shows", "5", 1),
        ("72 clips, or 73", "72", 0),
        ("none", "0", 0),
    ],
)
def test_math_lenient(completion, answer, expected):
    assert math_lenient_reward(["p"], [completion], answer=[answer]) == [expected]


# --- inputs ------------------------------------------------------------------------------------


def rollout(prompt: Prompt, sample: int, text: str, finish: FinishReason) -> Rollout:
    tokens = TOKENIZER.encode(text) + list(TOKENIZER.eos_ids) * (finish is STOP)
    return Rollout(
        prompt, sample, np.asarray(tokens, np.int32), np.zeros(len(tokens), np.float32), finish
    )


def test_a_reward_is_told_text_columns_and_how_the_response_ended():
    one = Prompt(id=1, tokens=(5,), text="a1=", columns={"answer": "1"})
    two = Prompt(id=2, tokens=(6,), text="a2=", columns={"answer": "2", "level": 3})
    read = response_reader(["answer", "level"], TOKENIZER)
    told = [
        read(rollout(one, 0, "#1", STOP)),
        read(rollout(one, 1, "#1", LENGTH)),
        read(rollout(two, 0, "#2", STOP)),
    ]
    once, twice = TOKENIZER.encode("#1"), TOKENIZER.encode("#2")
    first = {"answer": "1", "level": None, "finish_reason": STOP}
    second = {"answer": "2", "level": 3, "finish_reason": STOP}
    assert told == [
        Response("a1=", "#1", first, (5,), [*once, 1]),
        Response("a1=", "#1", first | {"finish_reason": LENGTH}, (5,), once),
        Response("a2=", "#2", second, (6,), [*twice, 1]),
    ]
    with RewardScorer("exact", timeout=1.0) as scorer:
        scoring = scorer.begin([one.prompt for one in told], told.__getitem__)
        for row in range(3):
            scoring.add(row, row)
        scores = scoring.rewards()
    assert scores.dtype == np.float32 and scores.tolist() == [1, 0, 1]


@pytest.mark.parametrize("function", [exact_reward, math_reward])
def test_a_column_that_is_needed_and_not_there_is_named(function):
    columns = {"answer": ["1"], "finish_reason": [STOP]}
    for missing in columns:
        left = {name: values for name, values in columns.items() if name != missing}
        with pytest.raises(UserError, match=f"needs the column '{missing}'"):
            function(["p"], ["#1"], **left)


# --- which function ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "accuracy",
            "reward is 'accuracy': expected exact, math, math_lenient, none, module:function",
        ),
        ("module:", "option --reward is 'module:'"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("json.no_such_part:f", "there is no module 'json.no_such_part'"),
        ("absent/rewards.py:f", "file absent/rewards.py does not exist"),
        ("json:lods", r"json has no function 'lods' \(it has .*loads"),
        ("{path}:NOT_A_FUNCTION", "no function 'NOT_A_FUNCTION'.*brevity"),
    ],
)
def test_a_function_that_is_not_there(tmp_path, spec, message):
    path = tmp_path / "some_rewards.py"
    path.write_text("def brevity(prompts, completions, **columns): ...\nNOT_A_FUNCTION = 3")
    with pytest.raises(UserError, match=message):
        resolve_reward(spec.format(path=path))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_dependency", "raised ModuleNotFoundError .*no_such_dependency"),
        ("1 / 0", "raised ZeroDivisionError"),
        ("def f(:", "raised SyntaxError"),
        ("raise SystemExit(1)", "raised SystemExit"),
    ],
)
def test_a_module_that_does_not_import(tmp_path, code, message):
    path = tmp_path / "broken_rewards.py"
    path.write_text(code)
    with pytest.raises(UserError, match=message):
        resolve_reward(f"{path}:f")


# --- several rewards of one response, added up with their weights -----------------------------------

FAILURES = {cause: Failure(cause, f"failed by {cause}") for cause in Cause}
SCORES = st.one_of(
    st.floats(-100, 100),
    st.just(FAILURES[Cause.NONE]),
    st.sampled_from([FAILURES[cause] for cause in Cause if cause is not Cause.NONE]),
)


WEIGHTS = st.lists(st.sampled_from([1.0, 0.0, -0.5, 3.25, 1e-3]), min_size=1, max_size=4).filter(
    any
)


def functions(weights: list[float], rows: list[list[float | Failure]]) -> list[FunctionScores]:
    return [
        FunctionScores(f"m:f{i}", f"f{i}", weight, [row[i] for row in rows], [{}] * len(rows))
        for i, weight in enumerate(weights)
    ]


def reference(weights: list[float], scores: list[float | Failure]) -> float | str | None:
    """The rule in words: a failure, then nothing that applies, then the sum. One response."""
    total, applies = 0.0, False
    for weight, score in zip(weights, scores, strict=True):
        if weight == 0:
            continue
        if isinstance(score, Failure) and score.cause is not Cause.NONE:
            return "failed"
    for weight, score in zip(weights, scores, strict=True):
        if weight != 0 and isinstance(score, float):
            applies, total = True, total + weight * score
    return total if applies else None


@given(weights=WEIGHTS, data=st.data())
def test_the_reward_is_the_weighted_sum_of_what_applies(weights: list[float], data: st.DataObject):
    row = st.lists(SCORES, min_size=len(weights), max_size=len(weights))
    rows = data.draw(st.lists(row, max_size=6))
    rewards, failures = weighted_sum(functions(weights, rows))
    assert rewards.dtype == np.float32 and rewards.shape == (len(rows),)
    for row, scores in enumerate(rows):
        wanted = reference(weights, scores)
        if isinstance(wanted, float):
            np.testing.assert_allclose(rewards[row], wanted, rtol=1e-6, atol=1e-5)
            assert row not in failures
            continue
        assert math.isnan(rewards[row])
        assert (failures[row].cause is Cause.NONE) == (wanted is None)
        assert any(score is failures[row] for score in scores)


def test_a_sum_that_is_too_large_is_no_reward():
    rewards, failures = weighted_sum(functions([1e6], [[1e38], [1.0]]))
    np.testing.assert_array_equal(rewards, np.array([np.nan, 1e6], np.float32))
    assert failures.keys() == {0} and failures[0].cause is Cause.NOT_A_NUMBER
    assert "comes to 1e+44 with its weight, more than float32 holds" in failures[0].text


# --- metrics ----------------------------------------------------------------------------------------


def test_metrics_are_of_the_scored_responses_and_count_the_others_by_cause():
    rewards = np.array([[1.0, np.nan, 0.0], [2.0, 2.0, np.nan], [np.nan] * 3], np.float32)
    causes = [Cause.NONE, Cause.TIMEOUT, Cause.TIMEOUT, Cause.CRASHED, Cause.TIMEOUT]
    failures = {row: Failure(cause, "…") for row, cause in enumerate(causes)}
    assert describe_rewards(rewards, failures, []) == {
        "reward/mean": 1.25,
        "reward/std": pytest.approx(0.6875**0.5),
        "reward/groups_without_signal": 2 / 3,
        "reward/failed": 5,
        "reward/failed/crashed": 1,
        "reward/failed/none": 1,
        "reward/failed/timeout": 3,
    }


def test_where_nothing_was_scored_there_is_no_mean():
    nothing = np.full((1, 2), np.nan)
    described = describe_rewards(nothing, {}, [])
    assert np.isnan(mean_reward(nothing)) and np.isnan(described["reward/std"])
    assert described["reward/groups_without_signal"] == 1 and described["reward/failed"] == 0


def test_one_response_to_each_prompt_is_no_group_that_could_lack_a_signal():
    described = describe_rewards(np.ones((3, 1), np.float32), {}, [])
    assert described == {"reward/mean": 1.0, "reward/std": 0.0, "reward/failed": 0}


def test_several_functions_have_their_own_means_causes_and_numbers():
    none, slow = Failure(Cause.NONE, "…"), Failure(Cause.TIMEOUT, "…")
    right = FunctionScores("m:right", "right", 1.0, [1.0, 0.0, slow, none], [{}] * 4)
    measured = [{"acc": 1.0}, {"acc": 0.0, "two words": 3.0}, {}, {"mean": 9.0}]
    short = FunctionScores("m:short", "short", -2.0, [0.5, none, 0.25, none], measured)
    rewards, failures = weighted_sum([right, short])
    described = describe_rewards(rewards.reshape(2, 2), failures, [right, short])
    assert described["reward/mean"] == 0 and described["reward/failed"] == 2
    by_function = {name: x for name, x in described.items() if name.count("/") > 1}
    assert by_function == {
        "reward/failed/none": 1,
        "reward/failed/timeout": 1,
        "reward/right/mean": 0.5,
        "reward/right/failed/none": 1,
        "reward/right/failed/timeout": 1,
        "reward/short/mean": 0.375,
        "reward/short/failed/none": 2,
        "reward/short/acc": 0.5,
        "reward/short/two_words": 3.0,
    }
    alone = describe_rewards(right.array.reshape(2, 2), {2: slow, 3: none}, [right])
    assert not [name for name in alone if name.startswith("reward/right")]
