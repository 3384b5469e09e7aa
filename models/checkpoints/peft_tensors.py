"""How PEFT names and lays out an adapter's two tensors: one place for reading and for writing.

    a linear layer    A[rank, in], B[out, rank]
    experts           A[experts · rank, in], B[out, rank · experts]

The expert is the slowest index of A and the fastest of B. The outputs of gate_up_proj are gate's,
then up's.

PEFT wraps experts once for each of their stacks, the outer around the inner, and an adapter's name
says where its wrapper is: that of gate_up_proj is inside, if down_proj has one.
"""

import math
from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from pat_jax.models.adapted_modules import is_stack
from pat_jax.models.lora import Adapter

PREFIX = "base_model.model."  # PEFT wraps the model twice
A, B = ".lora_A.weight", ".lora_B.weight"
Shape = tuple[int, ...]


def wrapper(module: str, modules: Container[str]) -> str:
    """The module that has a module's tensors in PEFT, where `modules` have adapters."""
    if not is_stack(module):
        return module
    experts, _, last = module.rpartition(".")
    is_inner = last == "gate_up_proj" and f"{experts}.down_proj" in modules
    return f"{experts}.base_layer" if is_inner else experts


def parameter(module: str) -> str:
    """What `target_parameters` calls a stack or a router."""
    return module if is_stack(module) else f"{module}.weight"


def stored_shapes(module: str, shapes: Adapter) -> tuple[Shape, Shape]:
    """Of A and B, for the shapes of an adapter."""
    a, b = shapes.a, _parts(shapes)
    if not is_stack(module):
        return (a[0], math.prod(a[1:])), (math.prod(b[0][:-1]), b[0][-1])
    experts, rank, into = a
    return (experts * rank, into), (sum(out for _, out, _ in b), rank * experts)


def to_stored(module: str, adapter: Adapter) -> tuple[np.ndarray, np.ndarray]:
    """A and B of an adapter of host arrays, not padded."""
    shapes = Adapter(adapter.a.shape, [b.shape for b in _parts(adapter)])
    in_a, in_b = stored_shapes(module, shapes)
    whole = _parts(adapter)[0]
    if is_stack(module):
        whole = np.concatenate(_parts(adapter), axis=1).transpose(1, 2, 0)
    return adapter.a.reshape(in_a), whole.reshape(in_b)


def from_stored(module: str, a: np.ndarray, b: np.ndarray, shapes: Adapter) -> Adapter:
    """The adapter of `shapes` that is stored as A and B."""
    if not is_stack(module):
        return Adapter(a.reshape(shapes.a), b.reshape(shapes.b))
    experts, rank, _ = shapes.a
    whole = b.reshape(-1, rank, experts).transpose(2, 0, 1)
    ends = np.cumsum([shape[1] for shape in _parts(shapes)])[:-1]
    parts = np.split(whole, ends, axis=1)
    return Adapter(a.reshape(shapes.a), parts if isinstance(shapes.b, list) else parts[0])


def of_wrappers(modules: Iterable[str]) -> dict[str, str]:
    """Modules that have adapters, by the modules that have their tensors in PEFT."""
    every = list(modules)
    return {wrapper(module, every): module for module in every}


def _parts(adapter: Adapter) -> list[Any]:
    return adapter.b if isinstance(adapter.b, list) else [adapter.b]
