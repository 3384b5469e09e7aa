"""The problems and rewards of a run, as plain values."""

from collections.abc import Sequence
from dataclasses import dataclass

from pat_jax.config.data import DataConfig
from pat_jax.config.evaluation import EvalConfig
from pat_jax.config.rollout import RolloutConfig


@dataclass(frozen=True)
class TaskChoice:
    """The problems that the policy learns from, those that it is evaluated on, and how their texts
    become tokens.

    Attributes:
      model: the model whose tokenizer is used; data files need a checkpoint's tokenizer.
      reward: names of rewards; auto stands for the task's own reward.
      demonstrations: steps of the supervised stage; 0: there is no such stage.
      learns: whether the run trains the policy.
    """

    model: str
    data: DataConfig
    eval: EvalConfig
    rollout: RolloutConfig
    reward: Sequence[str]
    seed: int
    demonstrations: int
    learns: bool
    skips_special_tokens: bool

    def rewards(self, own: str) -> list[str]:
        """Returns the names of the rewards, `auto` replaced by `own`, the task's reward."""
        return [own if reward == "auto" else reward for reward in self.reward]
