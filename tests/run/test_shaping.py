"""What a resumed run takes of its checkpoint for shaping rewards, and what of its options."""

import json

import pytest

from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.run.start.shaping import KL_OF_A_TOKEN, Shaping


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
def test_the_weight_of_the_penalty_goes_on_if_its_option_is_the_same(
    resumed: AlgorithmConfig, expected: float
):
    shaping = Shaping.of(options(), {}).after({KL_OF_A_TOKEN: 9.0}, 10)
    meta = json.loads(json.dumps(shaping.to_meta()))
    again = Shaping.of(resumed, meta)
    assert again.kl.beta == pytest.approx(expected, rel=1e-12)
    # It is still the weight of a run that is resumed once more.
    assert Shaping.of(resumed, again.to_meta()) == again
