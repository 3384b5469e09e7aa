"""Every option that the commands which learn from files share, checked where it is declared.

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
from pat_jax.config.optimizer import OptimizerConfig
from pat_jax.config.shared import ComputeDtype, RowOptions


@dataclass(frozen=True)
class LearnedFiles(RowOptions):
    """Files to learn from."""

    SECTION = "data."

    files: tuple[str, ...] = option((), NAMES, **SHORT_FORM)
    """Files, patterns of their names, or datasets of the Hugging Face Hub."""


@dataclass(frozen=True)
class HeldoutConfig(EvalSchedule):
    """Evaluation on held-out examples."""

    every: int = option(100, STEPS)
    data: tuple[str, ...] = option((), NAMES)
    """Files to evaluate on, read like those of --data. If none is given, --eval.share of --data is
    held out."""
    share: float = option(0.05, FRACTION)
    """Share of --data that is held out, chosen by a hash of the prompt, the chat or the text. A
    long text is divided into parts of 4,096 characters, each with its own hash."""
    num_examples: int = option(256, RESPONSES)
    """Maximum number of held-out examples or pairs (for texts: rows) to evaluate on."""


@dataclass(frozen=True)
class FineTuning(AnyRun):
    """A run that learns from files, packed into rows, without generating anything."""

    epochs: float = option(1.0, positive(10**6))
    """Number of passes over the data."""
    steps: int = option(0, STEPS)
    """Number of optimizer steps; 0 trains for --epochs."""
    batch_size: int = option(32, RESPONSES)
    """Number of examples or pairs (for texts: rows) in one optimizer step. The loss is the mean
    over all tokens that it covers, or over the pairs."""
    max_length: int = auto(count(2, 2**24))
    """Maximum length, in tokens, of an example or of a text of a pair; at most the model's context.
    Longer ones are left out and counted. Texts are cut into rows of this length. auto: 1,024, or
    the context if that is shorter."""
    router_aux_loss_coef: float = option(1e-3, not_negative(1000))
    """Weight of the loss that balances the load of a mixture of experts (Switch Transformer, eq. 4;
    docs/models.md). 0 turns it off. Models without experts have no such loss."""
    tokens_per_micro_batch: int = option(8192, COUNT)
    """Maximum number of tokens (rows x length, on all devices together) in one forward and backward
    pass. Gradients of several passes accumulate."""
    seed: int = option(0, SEED)
    """Random seed of the order of the data, and of random weights."""
    device_memory_gib: float = option(0.0, MEMORY_GIB)
    """Memory of one device in GiB; 0 asks the device."""
    compute_dtype: ComputeDtype = "auto"
    """Data type of the forward pass; master weights are kept in --optimizer.weight_dtype. auto:
    bfloat16 on GPUs and TPUs, float32 on CPUs."""
    data: LearnedFiles = field(default_factory=LearnedFiles)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(schedule="cosine"))
    eval: HeldoutConfig = field(default_factory=HeldoutConfig)

    @property
    def micro_batch_option(self) -> str:
        return f"--tokens_per_micro_batch ({self.tokens_per_micro_batch})"

    @property
    def learned_from(self) -> str:
        return "examples (--max_length)"
