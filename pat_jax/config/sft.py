"""Every option of supervised fine-tuning, checked where it is declared.

The string under a field is its help text on the command line. Names are TRL's where it has one.
"""

from dataclasses import dataclass, field

from pat_jax.common.options.declared import SHORT_FORM, auto, option
from pat_jax.common.rules import (
    COUNT,
    FRACTION,
    MEMORY_GIB,
    NAMES,
    RESPONSES,
    SEED,
    STEPS,
    count,
    not_negative,
    positive,
)
from pat_jax.config.any_run import AnyRun
from pat_jax.config.evaluation import EvalSchedule
from pat_jax.config.learning import OptimizerConfig
from pat_jax.config.shared import ChatOptions, ComputeDtype


@dataclass(frozen=True)
class SftDataConfig(ChatOptions):
    """Examples to learn from."""

    SECTION = "data."

    files: tuple[str, ...] = option((), NAMES, **SHORT_FORM)
    """JSON, JSON-lines or Parquet files of examples, patterns of their names ('data/*.parquet'), or
    datasets of the Hugging Face Hub (owner/name:config/split, as `train --help` says): prompt and
    completion, messages, or text. Any other file is one text (UTF-8); a folder is all files in it
    and below. Texts are joined by the end token and cut into rows of --max_length."""
    prompt_key: str = ""
    """Column of the prompt, text or chat messages; `a.b` is field b of column a. Empty: prompt."""
    completion_key: str = ""
    """Column of the completion, text or chat messages. Empty: completion."""
    messages_key: str = ""
    """Column of chats. Empty: messages."""
    text_key: str = ""
    """Column of texts; all of their tokens are learned. Empty: text."""


@dataclass(frozen=True)
class SftEvalConfig(EvalSchedule):
    """The loss on held-out examples."""

    every: int = option(100, STEPS)
    data: tuple[str, ...] = option((), NAMES)
    """Files of examples to evaluate on, read like those of --data. If none is given, a share of
    --data is held out."""
    share: float = option(0.05, FRACTION)
    """Share of --data that is held out, by a hash of the prompt, the chat or the text; a long text
    is divided into parts of 4,096 characters, each with its own hash."""
    num_examples: int = option(256, RESPONSES)
    """Most held-out examples to evaluate on; for texts, rows."""


@dataclass(frozen=True)
class SftConfig(AnyRun):
    """Teaches a language model by examples: completions of prompts, chats or texts, packed into
    rows. `python -m pat_jax.train --model taught` can go on from what this exports.

        python -m pat_jax.sft --model Qwen/Qwen2.5-0.5B --data examples/lessons.jsonl \\
            --checkpoint.export_dir taught

    A built-in shape starts from random weights, with bytes as tokens.

        python -m pat_jax.sft --model demo-moe --data 'docs/*.md' --optimizer.learning_rate 1e-3
    """

    LEARNING_RATE = 2e-5

    model: str = ""
    """A Hugging Face checkpoint directory, a model of the Hugging Face Hub (owner/name), or a
    built-in shape such as demo-moe, with random weights. Shapes, and directories without a
    tokenizer and with a vocabulary of 257 to 512, take the bytes of a text as its tokens."""
    epochs: float = option(1.0, positive(10**6))
    """Passes over the examples."""
    steps: int = option(0, STEPS)
    """Optimizer steps; 0 trains for --epochs."""
    batch_size: int = option(32, RESPONSES)
    """Examples in one optimizer step; for texts, rows. The loss is the mean over all their learned
    tokens."""
    max_length: int = auto(count(2, 2**24))
    """Longest example in tokens, at most the model's context; longer ones are left out and counted.
    Texts are cut into rows of this length. auto: 1,024, or the context if that is shorter."""
    truncate: bool = False
    """Cut longer examples at max_length instead."""
    completion_only_loss: bool = True
    """For prompts with completions, learn only the completion."""
    assistant_only_loss: bool = True
    """For messages, learn only the assistant's turns."""
    router_aux_loss_coef: float = option(1e-3, not_negative(1000))
    """Weight of the loss that balances the load of a mixture of experts (Switch Transformer, eq. 4;
    docs/experts.md); 0: none. Models without experts have no such loss."""
    tokens_per_micro_batch: int = option(8192, COUNT)
    """Token budget (rows x length, all devices together) of one forward-backward pass; gradients
    accumulate over the rest."""
    seed: int = option(0, SEED)
    """Seed of the order of the examples, and of random weights."""
    device_memory_gib: float = option(0.0, MEMORY_GIB)
    """Memory of one device in GiB; 0 asks the device."""
    compute_dtype: ComputeDtype = "auto"
    """Arithmetic of the forward pass; master weights are kept in --optimizer.weight_dtype. auto:
    bfloat16 on GPUs and TPUs, float32 on CPUs."""
    data: SftDataConfig = field(default_factory=SftDataConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(schedule="cosine"))
    eval: SftEvalConfig = field(default_factory=SftEvalConfig)

    @property
    def micro_batch_option(self) -> str:
        """The option that sets the size of a micro-batch, with its value."""
        return f"--tokens_per_micro_batch ({self.tokens_per_micro_batch})"

    @property
    def learned_from(self) -> str:
        return "examples (--max_length)"
