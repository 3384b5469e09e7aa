"""Options of the critic, the model that predicts values."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pat_jax.common.options.declared import Options, option, options_of
from pat_jax.common.rules import LEARNING_RATE, STEPS
from pat_jax.config.lora import AdapterConfig
from pat_jax.config.optimizer import OptimizerConfig

_RATE = 1e-5  # as in verl
REWARD_MODEL = "model:"  # before a reward model's directory or name, in --reward


@dataclass(frozen=True)
class CriticAdapterConfig(AdapterConfig):
    """Low-rank adapters, trained with the head instead of the whole critic."""

    SECTION = "critic.lora."


@dataclass(frozen=True)
class CriticConfig(Options):
    """The critic (docs/ppo.md). Optimizer options that are not given here are the policy's."""

    SECTION = "critic."

    model: str = ""
    """Model that the critic begins as: a Hugging Face directory or a model of the Hub. If it has a
    scalar head (a reward model, a critic), the critic keeps the head; if not, the head begins with
    zeros. If it is empty: the first reward model of --reward, or else the policy."""
    learning_rate: float | None = option(None, LEARNING_RATE)
    """Peak learning rate. Default: 1e-5, or ten times that with --critic.lora.rank."""
    warmup_steps: int = option(0, STEPS)
    """Number of optimizer steps in which the learning rate rises linearly to its peak."""
    pretrain_steps: int = option(0, STEPS)
    """Number of iterations at the beginning that train only the critic, not the policy."""
    export_dir: str = ""
    """Write the final critic to this folder as a Hugging Face checkpoint (…ForTokenClassification
    with one label). If it is empty, nothing is exported."""
    lora: CriticAdapterConfig = field(default_factory=CriticAdapterConfig)

    def optimizer(self, of_policy: OptimizerConfig) -> OptimizerConfig:
        """Returns the policy's optimizer options, with the critic's learning rate and warm-up."""
        rate = self.learning_rate
        if rate is None:
            rate = 10 * _RATE if self.lora.is_on else _RATE
        return replace(of_policy, learning_rate=rate, warmup_steps=self.warmup_steps)


def critic_source(critic: str, rewards: Sequence[str], policy: str) -> str:
    """Returns the name of the model that the critic begins as, or "" if that is the policy.

    Args:
      critic, rewards, policy: `--critic.model`, `--reward` and `--model`.
    """
    scoring = (one.removeprefix(REWARD_MODEL) for one in rewards if one.startswith(REWARD_MODEL))
    source = critic or next(scoring, "")
    return "" if source == policy else source


@dataclass(frozen=True)
class WithCritic(Options):
    """A run that may have a critic."""

    critic: CriticConfig = field(default_factory=CriticConfig)

    def check_no_critic(self, baseline: str) -> None:
        """Raises OptionError if an option of a critic is given, where `baseline` has no critic."""
        names = (f"critic.{option.name}" for option in options_of(CriticConfig()))
        self.need_defaults(names, f"with --algorithm.baseline {baseline}, which has no critic")
