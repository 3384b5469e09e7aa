"""Options of an optimizer, and of what it keeps."""

from dataclasses import dataclass
from typing import Literal

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import (
    FRACTION_OR_ZERO,
    LEARNING_RATE,
    STEPS,
    not_negative,
    positive,
)


@dataclass(frozen=True)
class OptimizerState(Options):
    """How the optimizer's state is kept."""

    SECTION = "optimizer."

    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of both moments; bfloat16, rounded stochastically, takes 4 bytes a parameter
    instead of 8."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the master weights; bfloat16, rounded stochastically at each step, takes 2 bytes
    a parameter instead of 4. Gradients are still summed in float32."""
    offload: bool = False
    """Keep both moments in host memory except during the optimizer's step. Rollouts and gradients
    can use their device memory; each step fetches them and sends them back."""


@dataclass(frozen=True)
class OptimizerConfig(OptimizerState):
    """AdamW with linear warm-up, then a constant or cosine rate."""

    learning_rate: float | None = option(None, LEARNING_RATE)
    """Peak learning rate. If it is not given: 1e-6 for reinforcement learning and 2e-5 for
    supervised fine-tuning, ten times that with --lora.rank or --lora.adapter (docs/lora.md)."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    warmup_steps: int = option(0, STEPS)
    """Optimizer steps of linear warm-up."""
    weight_decay: float = option(0.0, not_negative(100))
    """Decoupled weight decay; norms and biases are exempt."""
    b1: float = option(0.9, FRACTION_OR_ZERO)
    """Decay of the first moment."""
    b2: float = option(0.95, FRACTION_OR_ZERO)
    """Decay of the second moment."""
    max_grad_norm: float = option(1.0, positive(10**6))
    """Global-norm gradient clipping."""
