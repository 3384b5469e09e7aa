"""The options that the engine of rollouts is built from, as plain values."""

from dataclasses import dataclass

from pat_jax.config.lora import LoraConfig
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.shared import LayoutChoice
from pat_jax.config.speculation import SpeculationConfig


@dataclass(frozen=True)
class EngineChoice:
    """The model that generates, its layouts, and how it generates.

    Attributes:
      model: a directory, a model of the Hub or a built-in shape.
      lora: options of the adapters that training adds to the model; rank 0: no adapters.
      dtype: data type of the arithmetic, float32 or bfloat16.
      fsdp_size: number of devices over which parameters are divided; 0: all devices.
      is_deterministic: whether all programs are compiled before the first rollout.
    """

    model: str
    rollout: RolloutConfig
    speculation: SpeculationConfig
    layouts: LayoutChoice
    lora: LoraConfig
    dtype: str
    fsdp_size: int
    is_deterministic: bool
