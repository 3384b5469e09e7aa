"""How measured stages scale composed ones, by numbers worked out by hand."""

import pytest

from pat_jax.profiling.placement.factors import Factors, StageSeconds

COMPOSED = StageSeconds(
    {
        "log-probabilities of the reference": 4.0,
        "scores of the reward model 1": 2.0,
        "scores of the reward model 2": 1.0,
        "gradients of the policy": 10.0,
        "step of the policy": 3.0,
        "weights to the rollout": 1.0,
    },
    tokens=1000,
)


def factors(seconds: dict[str, float], tokens: float = 1000) -> Factors:
    return Factors.between(StageSeconds(seconds, tokens), COMPOSED)


@pytest.mark.parametrize(
    ("name", "seconds", "expected"),
    [
        # Half of the tokens: 2 s are composed for them, and 3 s were measured.
        ("log-probabilities of the reference", 3.0, {"log-probabilities of the reference": 1.5}),
        # 1 + 0.5 s: both were measured together.
        (
            "scores of the reward model",
            3.0,
            {"scores of the reward model 1": 2.0, "scores of the reward model 2": 2.0},
        ),
        # 5 s for the gradients of half of the tokens, and 3 s of steps for any number.
        (
            "update of the policy",
            12.0,
            {"gradients of the policy": 1.5, "step of the policy": 1.5},
        ),
        ("gradients of the policy", 10.0, {"gradients of the policy": 2.0}),
        ("step of the policy", 6.0, {"step of the policy": 2.0}),
        ("weights to the rollout", 0.5, {"weights to the rollout": 0.5}),
        ("rollout", 9.0, {}),  # is replayed
    ],
)
def test_passes_are_compared_by_tokens_and_steps_as_they_are(
    name: str, seconds: float, expected: dict[str, float]
):
    found = factors({name: seconds}, tokens=500)
    assert found.by_stage == pytest.approx(expected)
    for stage in COMPOSED.seconds:
        assert found.of(stage) == pytest.approx(expected.get(stage, 1.0))


def test_stages_that_were_not_measured_are_told():
    found = factors({"update of the policy": 13.0, "scores of the reward model": 3.0})
    assert found.lacking == ("log-probabilities of the reference", "weights to the rollout")
    assert {*found.by_stage.values()} == {1.0}
