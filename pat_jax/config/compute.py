"""Options of an update as plain values, for the trainer and for predictions of its memory."""

from dataclasses import dataclass
from typing import Literal

from pat_jax.config.optimizer import OptimizerState

Remat = Literal["auto", "full", "attention", "dots", "none"]
# Each form of rematerialization keeps less than the one before, and recomputes more.
REMAT_FORMS: tuple[Remat, ...] = ("none", "dots", "attention", "full")
SCANNED_FROM = 8  # least number of layers that run as a loop


@dataclass(frozen=True)
class Compute:
    """How a model is computed, in an update or in forward passes alone.

    All fields except `dtype` are those of `UpdateOptions`; their defaults suit a frozen model.
    """

    dtype: str  # float32 or bfloat16
    remat: Remat = "none"
    scan_layers: Literal["auto", "true", "false"] = "auto"
    experts: Literal["auto", "gathered", "exchanged"] = "auto"

    def scans(self, num_layers: int, platform: str) -> bool:
        """Whether training runs the layers of a model as a loop.

        Args:
          platform: `jax.Device.platform` of the devices.
        """
        if self.scan_layers != "auto":
            return self.scan_layers == "true"
        can_loop = platform != "cpu" or self.dtype == "float32"
        return can_loop and num_layers >= SCANNED_FROM


@dataclass(frozen=True)
class MicroBatches:
    """The numbers that determine the shapes of an update's micro-batches.

    Attributes:
      tokens: most tokens of a micro-batch, on all devices together.
      prompts: number of prompts in an optimizer step, each with `num_generations` responses.
      min_length: the shortest row's length in tokens.
      demonstrations: most demonstrations in a step of the supervised stage; 0: no such stage.
    """

    tokens: int
    prompts: int
    num_generations: int
    max_prompt_length: int
    max_completion_length: int
    min_length: int
    demonstrations: int


@dataclass(frozen=True)
class MemoryOptions:
    """Options that a user can change if an update does not fit a device, and their names.

    Attributes:
      trains_adapters: whether only adapters are trained, so that the optimizer's state is small.
      micro_batch: the option of a micro-batch's size, with its value; empty: it is the least.
      learned_from: a name for what the update learns from, which the user could shorten.
    """

    optimizer: OptimizerState
    compute: Compute
    trains_adapters: bool
    micro_batch: str
    learned_from: str
