"""Options of a plan's roles: the critic, reward models, the teacher."""

from dataclasses import dataclass, field

from pat_jax.common.options.declared import Options
from pat_jax.config.algorithms import Name as AlgorithmName
from pat_jax.config.critic import CriticAdapterConfig
from pat_jax.config.teacher import TeacherConfig


@dataclass(frozen=True)
class PlannedAlgorithm(Options):
    """What is trained, and what it reads."""

    SECTION = "algorithm."

    name: AlgorithmName = "grpo"
    """Algorithm of the update; ppo trains a critic beside the policy. See --algorithm.name of
    train."""


@dataclass(frozen=True)
class PlannedCritic(Options):
    """The model that predicts values."""

    SECTION = "critic."

    model: str = ""
    """The critic with ppo, named as in --model; empty takes the first reward model, or else the
    policy's shape."""
    lora: CriticAdapterConfig = field(default_factory=CriticAdapterConfig)


@dataclass(frozen=True)
class PlannedTeacher(TeacherConfig):
    """The frozen model that the policy is distilled from."""

    model: str = ""
    """A model that scores the tokens of every response, named as in --model; empty has none."""
