"""An evaluation's engine has no more room than its problems need."""

import pytest

from pat_jax.config.rollout import RolloutConfig
from pat_jax.evaluation.problem_sets import ProblemSets
from pat_jax.rl.batches.types import Prompt
from pat_jax.run.start.heldout import HeldoutSet


def problem_sets(*lengths: int) -> ProblemSets:
    prompts = [Prompt(i, (5,) * n, "", {}) for i, n in enumerate(lengths)]
    return ProblemSets(["math"], [HeldoutSet("sums", prompts)], [], [], {})


@pytest.mark.parametrize(
    ("lengths", "samples", "rows", "longest"),
    [
        ((20, 90, 40), 2, 8, 90),  # six samples, a row of each of four devices alike
        ((20,), 1, 4, 20),
        ((20, 90, 40), 100, 64, 90),  # no more than the options say
        ((700, 30), 1, 4, 512),
    ],
)
def test_rows_and_prompts_of_an_evaluation(lengths, samples, rows, longest):
    asked = RolloutConfig(prompts_per_step=64, num_generations=1, max_prompt_length=512)
    fitted = problem_sets(*lengths).fitted(asked, samples, num_devices=4)
    assert (fitted.prompts_per_step, fitted.max_prompt_length) == (rows, longest)
