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
    """Data type of Adam's two moments. bfloat16, rounded stochastically, takes 4 bytes per
    parameter for both instead of 8."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the master weights. bfloat16, rounded stochastically at each step, takes 2 bytes
    per parameter instead of 4. Gradients are still summed in float32."""
    offload: bool = False
    """Keep both moments in host memory except during the optimizer's step, so that rollouts and
    gradients can use their device memory. Each step copies them to the devices and back."""


@dataclass(frozen=True)
class OptimizerConfig(OptimizerState):
    """AdamW; the learning rate warms up linearly, then is constant or follows a cosine."""

    learning_rate: float | None = option(None, LEARNING_RATE)
    """Peak learning rate. Default: 1e-6 for reinforcement learning and DPO, 1e-5 for reward models,
    2e-5 for other fine-tuning; ten times that with LoRA (docs/lora.md)."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling as a cosine to about 0."""
    warmup_steps: int = option(0, STEPS)
    """Number of optimizer steps in which the learning rate rises linearly to its peak."""
    weight_decay: float = option(0.0, not_negative(100))
    """Decoupled weight decay; norms and biases are exempt."""
    b1: float = option(0.9, FRACTION_OR_ZERO)
    """Decay rate of Adam's first moment."""
    b2: float = option(0.95, FRACTION_OR_ZERO)
    """Decay rate of Adam's second moment."""
    max_grad_norm: float = option(1.0, positive(10**6))
    """Maximum global norm of the gradients, to which larger ones are scaled down."""
