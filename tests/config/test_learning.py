"""Options with which nothing, or something else, would be learned in silence."""

import pytest

from pat_jax.common.rules import OptionError
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.run import RunConfig


@pytest.mark.parametrize(
    ("option", "value"), [("num_generations", 1), ("temperature", 0.0), ("top_k", 1)]
)
def test_responses_that_cannot_differ_are_refused_where_something_is_trained(option, value):
    rollout = RolloutConfig(**{option: value})
    with pytest.raises(
        OptionError, match=rf"--rollout\.{option} is .* (at least 2|above 0)"
    ) as error:
        RunConfig(rollout=rollout)
    assert "an advantage compares the responses to one prompt." in str(error.value)
    assert RunConfig(rollout=rollout, train=False).learning_notes == []
    RunConfig(rollout=rollout, steps=0)


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 50}])
def test_training_on_a_part_of_the_distribution_is_said(options):
    (note,) = RunConfig(rollout=RolloutConfig(**options)).learning_notes
    assert "drawn from a part of the policy's distribution" in note and "\n" not in note


def test_half_of_dr_grpo_is_said():
    def notes(**options) -> list[str]:
        return RunConfig(algorithm=AlgorithmConfig(**options)).learning_notes

    (note,) = notes(scale_rewards="none")
    assert "loss_aggregation token is not Dr. GRPO, which takes constant" in note
    assert notes(scale_rewards="none", loss_aggregation="constant") == notes() == []
