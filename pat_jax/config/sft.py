"""Every option of supervised fine-tuning, checked where it is declared.

The string under a field is its help text on the command line. Names are TRL's where it has one.
"""

from dataclasses import dataclass, field
from typing import Literal

from pat_jax.common.options.declared import SHORT_FORM, option
from pat_jax.common.rules import NAMES, Rule, not_negative, positive
from pat_jax.config.fine_tuning import FineTuning, LearnedFiles


@dataclass(frozen=True)
class PairColumnOptions(LearnedFiles):
    """Columns of preference pairs."""

    chosen_key: str = ""
    """Column of the preferred response (text or chat messages); `a.b` is field b of column a.
    Default: chosen."""
    rejected_key: str = ""
    """Column of the response that is not preferred. Default: rejected."""


@dataclass(frozen=True)
class PairDataConfig(PairColumnOptions):
    """Preference pairs to learn from."""

    files: tuple[str, ...] = option((), NAMES, **SHORT_FORM)
    """Preference pairs: JSON, JSON-lines or Parquet files, patterns of file names
    ('data/*.parquet'), or datasets of the Hugging Face Hub (owner/name:config/split, as `train
    --help` says). They have the columns chosen and rejected, and also prompt unless both responses
    begin with the prompt."""
    prompt_key: str = ""
    """Column of the prompt (text or chat messages). Default: the first that exists of prompt,
    problem, question, instruction, query and input."""
    margin_key: str = ""
    """Column of a number by which the reward of the chosen response should exceed that of the
    rejected one. Default: the column margin, if there is one."""


DPO_LEARNING_RATE = 1e-6
SMOOTHING: Rule = (lambda x: 0 <= x < 0.5, "a number in [0, 0.5)")


@dataclass(frozen=True)
class SftDataConfig(PairColumnOptions):
    """Examples to learn from."""

    files: tuple[str, ...] = option((), NAMES, **SHORT_FORM)
    """Examples: JSON, JSON-lines or Parquet files, patterns of file names ('data/*.parquet'), or
    datasets of the Hugging Face Hub (owner/name:config/split, as `train --help` says). Their
    columns are prompt and completion, messages, or text; with --loss dpo chosen and rejected, and
    also prompt unless both responses begin with the prompt. Any other file is read as one text
    (UTF-8), and a folder as all files in it and its subfolders. Texts are joined by the end token
    and cut into rows of --max_length."""
    prompt_key: str = ""
    """Column of the prompt (text or chat messages); `a.b` is field b of column a. Default: the
    first that exists of prompt, problem, question, instruction, query and input."""
    completion_key: str = ""
    """Column of the completion (text or chat messages). Default: completion."""
    messages_key: str = ""
    """Column of chats. Default: messages."""
    text_key: str = ""
    """Column of texts; the loss covers all of their tokens. Default: text."""


@dataclass(frozen=True)
class SftConfig(FineTuning):
    """Trains a language model on examples: completions of prompts, chats or texts, packed into
    rows. `python -m pat_jax.train --model taught` can continue from the exported model.

        python -m pat_jax.sft --model Qwen/Qwen2.5-0.5B --data examples/lessons.jsonl \\
            --checkpoint.export_dir taught

    A built-in shape starts from random weights, with bytes as tokens.

        python -m pat_jax.sft --model demo-moe --data 'docs/*.md' --optimizer.learning_rate 1e-3
    """

    LEARNING_RATE = 2e-5

    model: str = ""
    """A Hugging Face checkpoint directory, a model of the Hugging Face Hub (owner/name), or a
    built-in shape (--help model) with random weights. Shapes, and directories with a vocabulary of
    257 to 512 and no tokenizer, use the bytes of a text as its tokens."""
    truncate: bool = False
    """Cut examples that are longer than --max_length, instead of leaving them out."""
    completion_only_loss: bool = True
    """In examples with prompt and completion, the loss covers only the completion."""
    assistant_only_loss: bool = True
    """In examples with messages, the loss covers only the assistant's turns."""
    loss: Literal["cross_entropy", "dpo"] = "cross_entropy"
    """What is minimized. cross_entropy: the cross-entropy of the tokens that the loss covers. dpo:
    the loss of direct preference optimization on pairs (Rafailov et al. 2023). Its frozen reference
    is the model at the start."""
    beta: float = option(0.1, positive(1000))
    """With --loss dpo: factor of the log-probability ratios to the reference. Larger values keep
    the policy closer to the reference."""
    label_smoothing: float = option(0.0, SMOOTHING)
    """With --loss dpo: assumed share of the pairs in which chosen and rejected are swapped
    (conservative DPO)."""
    data: SftDataConfig = field(default_factory=SftDataConfig)

    def __post_init__(self):
        super().__post_init__()
        if self.loss == "dpo":
            columns = ("data.completion_key", "data.messages_key", "data.text_key")
            names = ("truncate", "completion_only_loss", "assistant_only_loss", *columns)
            self.need_defaults(names, "with --loss dpo, which compares whole responses")
        else:
            names = ("beta", "label_smoothing", "data.chosen_key", "data.rejected_key")
            self.need_defaults(names, "with --loss cross_entropy, which knows no pairs")

    @property
    def default_learning_rate(self) -> float:
        return DPO_LEARNING_RATE if self.loss == "dpo" else self.LEARNING_RATE

    @property
    def learned_from(self) -> str:
        return "pairs (--max_length)" if self.loss == "dpo" else super().learned_from


@dataclass(frozen=True)
class RewardModelConfig(FineTuning):
    """Trains a reward model on preference pairs: a language model whose head gives one number, the
    higher for the preferred response. The exported model can be a --reward of `python -m
    pat_jax.train`.

        python -m pat_jax.reward_model --model Qwen/Qwen2.5-0.5B-Instruct \\
            --data examples/pairs.jsonl --checkpoint.export_dir judge
    """

    TRAINED = "reward model"
    LEARNING_RATE = 1e-5

    model: str = ""
    """A Hugging Face checkpoint directory, a model of the Hugging Face Hub (owner/name), or a
    built-in shape (--help model) with random weights. A language model gets a new head of zeros; a
    sequence classifier with one label keeps its head. Shapes, and directories with a vocabulary of
    257 to 512 and no tokenizer, use the bytes of a text as its tokens."""
    center_rewards_coefficient: float = option(0.0, not_negative(1000))
    """Weight of an additional loss, the square of the sum of a pair's two rewards, which keeps
    rewards around 0 (Eisenstein et al. 2023). A usual value is 0.01."""
    data: PairDataConfig = field(default_factory=PairDataConfig)

    @property
    def learned_from(self) -> str:
        return "pairs (--max_length)"
