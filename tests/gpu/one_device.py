"""The one device of the tests for GPUs, and what it computes with."""

import json
import os
from pathlib import Path
from typing import Any

import jax

from pat_jax.common.devices import Device
from pat_jax.models.kernels.kernel_choice import NAMES, Kernels

PLATFORM = os.environ.get("PAT_JAX_GPU_TESTS_ON", "gpu")
FIGURES = os.environ.get("PAT_JAX_GPU_FIGURES", "")  # a JSON file that tests add to


def device() -> Device:
    return jax.devices()[0]


def kernels() -> Kernels:
    """All that there are; on a CPU interpreted."""
    return Kernels(PLATFORM).having(NAMES)


def note(name: str, figures: dict[str, Any]) -> None:
    """Prints figures that no test holds against anything, and adds them to a file where one is named."""
    print(name, json.dumps(figures))
    if FIGURES:
        path = Path(FIGURES)
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(known | {name: figures}, indent=1))
