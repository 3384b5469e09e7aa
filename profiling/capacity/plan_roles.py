"""Options of a plan's roles, and their shapes: the critic, reward models, the teacher."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import count
from pat_jax.config.algorithms import Name as AlgorithmName
from pat_jax.config.critic import REWARD_MODEL
from pat_jax.config.lora import MOST_RANK
from pat_jax.config.teacher import TeacherConfig
from pat_jax.models.config import ModelConfig

CRITIC, TEACHER = "critic", "teacher"
Shape = Callable[[str, str], ModelConfig]  # of a model and the option that names it


@dataclass(frozen=True)
class PlannedAlgorithm(Options):
    """What is trained, and what it reads."""

    SECTION = "algorithm."

    name: AlgorithmName = "grpo"
    """Algorithm of the update; ppo trains a critic beside the policy. See --algorithm.name of
    train."""


@dataclass(frozen=True)
class PlannedAdapters(Options):
    """Low-rank adapters of the critic."""

    SECTION = "critic.lora."

    rank: int = option(0, count(0, MOST_RANK))
    """Adapters of this rank are trained, of all linear layers, beside the critic's head; 0 trains
    all of it. See --critic.lora.rank of train."""


@dataclass(frozen=True)
class PlannedCritic(Options):
    """The model that predicts values."""

    SECTION = "critic."

    model: str = ""
    """The critic with ppo, named as in --model; empty takes the first reward model, or else the
    policy's shape."""
    lora: PlannedAdapters = field(default_factory=PlannedAdapters)


@dataclass(frozen=True)
class PlannedTeacher(TeacherConfig):
    """The frozen model that the policy is distilled from."""

    model: str = ""
    """A model that scores the tokens of every response, named as in --model; empty has none."""


def shapes_of_roles(
    policy: ModelConfig,
    shape: Shape,
    *,
    critic: str | None,
    rewards: Sequence[str],
    teacher: str,
) -> Iterator[tuple[str, ModelConfig]]:
    """Yields the roles beside the policy and its reference, by name with their shapes.

    Args:
      shape: returns the shape of a model.
      critic: the model that it begins as; empty: the policy. None: the algorithm has none.
      rewards: values of `--reward`.
    """
    scoring = [_scalar(shape(each.removeprefix(REWARD_MODEL), "reward")) for each in rewards]
    if critic is not None:
        yield CRITIC, _scalar(shape(critic, "critic.model") if critic else policy)
    for number, model in enumerate(scoring, 1):
        yield f"reward model {number}" if len(scoring) > 1 else "reward model", model
    if teacher:
        yield TEACHER, shape(teacher, "teacher.model")


def _scalar(model: ModelConfig) -> ModelConfig:
    return replace(model, head="scalar")
