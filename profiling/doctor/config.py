"""Options of `python -m pat_jax.doctor`."""

from dataclasses import dataclass
from typing import Literal

from pat_jax.common.rules import DEVICES, GIVEN, TOKENS, check, count, require


@dataclass(frozen=True)
class DoctorConfig:
    """Examines a machine in about a minute: devices, memory, links, kernels, a switch of layouts,
    an iteration of training. Ends with one line that says what to do.

        python -m pat_jax.doctor --model qwen3-8b --out doctor.json
    """

    model: str = "qwen3-0.6b"
    """Whose attention the kernels are asked for: a Hugging Face checkpoint directory, a model of the
    Hugging Face Hub (owner/name), or the name of a built-in shape. Nothing else of it is loaded: the switch and the iteration are those of a tiny model."""
    devices: int = 0
    """Devices to use; 0 takes all (on CPU the largest power of two up to min(cores, 8))."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Arithmetic that the kernels are asked for."""
    page_size: int = 16
    """Tokens in one page of the KV cache."""
    target: str = ""
    """A machine that is not here, such as h100:8 or v5e:2x4: its kernels are compiled by its own compiler,
    and nothing is run. Takes the extra `plan`."""
    out: str = ""
    """A JSON file for everything that was found; empty writes none."""
    step_seconds: int = 300
    """The most that one part may take: one that hangs, as links that are broken do, ends the examination
    there."""

    def __post_init__(self):
        check(self, "model", GIVEN)
        check(self, "devices", DEVICES)
        check(self, "page_size", TOKENS)
        check(self, "step_seconds", count(1, 86_400))
        require(
            not (self.target and self.devices),
            "devices",
            self.devices,
            "0 with --target, which says how many",
        )
