"""Names and shapes of an adapter's two tensors in PEFT, for reading and writing.

    a linear layer    A[rank, in], B[out, rank]
    experts           A[experts · rank, in], B[out, rank · experts]

The expert is the slowest index of A's first dimension and the fastest of B's second. The outputs of
gate_up_proj are gate's, then up's.

PEFT wraps the experts' module once for each adapted stack, one wrapper around the other. Tensor
names contain the wrapper's: gate_up_proj has the inner wrapper if down_proj has an adapter, too.
"""

import math
from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from pat_jax.models.adapted_modules import is_stack
from pat_jax.models.hf_tensors import SCALAR_HEAD
from pat_jax.models.lora import Adapter

PREFIX = "base_model.model."  # PEFT wraps the model twice
A = ".lora_A.weight"
B = ".lora_B.weight"
HEAD = tuple(PREFIX + name for name in SCALAR_HEAD)  # a scalar head's tensors, stored unadapted
# PEFT's task types, by the base's head and whether the head has a bias. Then the modules that PEFT
# stores whole for the two types with a scalar head; a model has one of them.
TASKS = {
    ("vocab", False): "CAUSAL_LM",
    ("scalar", False): "SEQ_CLS",
    ("scalar", True): "TOKEN_CLS",
}
HEAD_MODULES = ("classifier", "score")
Shape = tuple[int, ...]


def wrapper(module: str, modules: Container[str]) -> str:
    """Returns the name of the PEFT module that stores the adapter of `module`, if `modules` have
    adapters."""
    if not is_stack(module):
        return module
    experts, _, last = module.rpartition(".")
    is_inner = last == "gate_up_proj" and f"{experts}.down_proj" in modules
    return f"{experts}.base_layer" if is_inner else experts


def parameter(module: str) -> str:
    """Returns the name that a stack of experts or a router has in `target_parameters`."""
    return module if is_stack(module) else f"{module}.weight"


def stored_shapes(module: str, shapes: Adapter) -> tuple[Shape, Shape]:
    """Returns the shapes of PEFT's A and B for an adapter whose leaves are shapes."""
    if not is_stack(module):
        rank, *into = shapes.a
        *out, _ = shapes.b
        return (rank, math.prod(into)), (math.prod(out), rank)
    experts, rank, into = shapes.a
    return (experts * rank, into), (sum(out for _, out, _ in _parts(shapes)), rank * experts)


def to_stored(module: str, adapter: Adapter) -> tuple[np.ndarray, np.ndarray]:
    """Returns PEFT's A and B for an adapter whose leaves are host arrays without padding."""
    if not is_stack(module):
        rank = len(adapter.a)
        return adapter.a.reshape(rank, -1), adapter.b.reshape(-1, rank)
    whole = np.concatenate(_parts(adapter), axis=1).transpose(1, 2, 0)
    return adapter.a.reshape(-1, adapter.a.shape[-1]), whole.reshape(len(whole), -1)


def from_stored(module: str, a: np.ndarray, b: np.ndarray, shapes: Adapter) -> Adapter:
    """Returns the adapter that PEFT's A and B (`a` and `b`) store; its leaves have `shapes`."""
    if not is_stack(module):
        return Adapter(a.reshape(shapes.a), b.reshape(shapes.b))
    experts, rank, _ = shapes.a
    whole = b.reshape(-1, rank, experts).transpose(2, 0, 1)
    ends = np.cumsum([shape[1] for shape in _parts(shapes)])[:-1]
    parts = np.split(whole, ends, axis=1)
    return Adapter(a.reshape(shapes.a), parts if isinstance(shapes.b, list) else parts[0])


def of_wrappers(modules: Iterable[str]) -> dict[str, str]:
    """Returns the adapted modules by the name of PEFT's module that stores each (`wrapper`)."""
    every = list(modules)
    return {wrapper(module, every): module for module in every}


def _parts(adapter: Adapter) -> list[Any]:
    return adapter.b if isinstance(adapter.b, list) else [adapter.b]
