import numpy as np
import pytest

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.rewards.built_in import exact_reward, math_lenient_reward, math_reward
from pat_jax.rl.rewards.responses import Response, response_reader
from pat_jax.rl.rewards.rewards import resolve_reward
from pat_jax.rl.rewards.scorer import RewardScorer

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
        ("accuracy", "reward is 'accuracy': expected exact, math, math_lenient, module:function"),
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
