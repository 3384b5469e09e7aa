"""Programs lowered for machines that are not there."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

# Of any kind: to lower Triton, JAX 0.11 asks for the generation.
GPU = AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")


def lowered_for(platform: str, function: Callable, *arguments: Any) -> str:
    """The text of a program as it is lowered for "tpu", "cuda" or "cpu"."""
    device = GPU if platform == "cuda" else None
    mesh = AbstractMesh((1,), ("one",), (AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=(platform,)).as_text()
