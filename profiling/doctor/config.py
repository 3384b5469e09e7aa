"""Options of `python -m pat_jax.doctor`."""

from dataclasses import dataclass
from typing import Literal

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import DEVICES, GIVEN, TOKENS, count


@dataclass(frozen=True)
class DoctorConfig(Options):
    """Examines a machine in about a minute: devices, memory, links, kernels, a switch of layouts,
    an iteration of training. Ends with one line that says what to do.

        python -m pat_jax.doctor --model qwen3-8b --out doctor.json
    """

    model: str = option("qwen3-0.6b", GIVEN)
    """The model for whose shapes the kernels are checked: a Hugging Face checkpoint directory, a
    model of the Hugging Face Hub (owner/name), or a built-in shape (--help model). Nothing else of
    the model is loaded: the switch of layouts and the iteration use a tiny model."""
    devices: int = option(0, DEVICES)
    """Number of devices to use; 0 takes all (on a CPU the largest power of two up to min(cores,
    8))."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type in which the kernels are checked."""
    page_size: int = option(16, TOKENS)
    """Tokens in one page of the KV cache."""
    out: str = ""
    """JSON file for all results. If it is empty, none is written."""
    step_seconds: int = option(300, count(1, 86_400))
    """Maximum time in seconds for one part of the examination. A part that hangs, for example
    because of broken links, ends the examination."""
