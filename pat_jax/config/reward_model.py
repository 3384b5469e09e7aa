"""Every option of training a reward model, checked where it is declared.

The string under a field is its help text on the command line. Names are TRL's where it has one.
"""

from dataclasses import dataclass, field

from pat_jax.common.options.declared import option
from pat_jax.common.rules import not_negative
from pat_jax.config.fine_tuning import FineTuning
from pat_jax.config.pairs import PairDataConfig


@dataclass(frozen=True)
class RewardModelConfig(FineTuning):
    """Trains a reward model on preference pairs: a language model with one number in place of
    logits, the larger for the preferred response. What it exports is a reward of
    `python -m pat_jax.train`.

        python -m pat_jax.reward_model --model Qwen/Qwen2.5-0.5B-Instruct \\
            --data examples/pairs.jsonl --checkpoint.export_dir judge
    """

    TRAINED = "reward model"
    LEARNING_RATE = 1e-5

    model: str = ""
    """A Hugging Face checkpoint directory, a model of the Hugging Face Hub (owner/name), or a
    built-in shape such as demo, with random weights. The weights of a language model get a new
    head, of zeros; a sequence classifier with one label keeps its head. Shapes, and directories
    without a tokenizer and with a vocabulary of 257 to 512, take the bytes of a text as its
    tokens."""
    center_rewards_coefficient: float = option(0.0, not_negative(1000))
    """Weight of the squared sum of a pair's rewards in the loss, which keeps them around 0
    (Eisenstein et al. 2023); usual: 0.01."""
    data: PairDataConfig = field(default_factory=PairDataConfig)

    @property
    def learned_from(self) -> str:
        return "pairs (--max_length)"
