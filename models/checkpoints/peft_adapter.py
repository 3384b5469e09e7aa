"""Reads and writes adapters in PEFT's format: adapter_config.json, adapter_model.safetensors.

Mistakes in an adapter are found from the configuration and the file's header, before any tensor is
read; only values that are not finite are found later.
"""

import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import jax
import numpy as np

from pat_jax.common.errors import UserError, shown
from pat_jax.models.adapted_modules import is_of_experts, linear_modules
from pat_jax.models.checkpoints.hf_export import appearing_at_once, check_export, write_json
from pat_jax.models.checkpoints.peft_config import (
    ADAPTER_CONFIG,
    GATE_UP,
    MODULES_TO_SAVE,
    TARGET_PARAMETERS,
    read_peft_config,
)
from pat_jax.models.checkpoints.peft_tensors import (
    HEAD,
    HEAD_MODULES,
    PREFIX,
    TASKS,
    A,
    B,
    Shape,
    from_stored,
    of_wrappers,
    parameter,
    stored_shapes,
    to_stored,
    wrapper,
)
from pat_jax.models.checkpoints.safetensors_file import (
    DTYPES,
    StoredTensor,
    read_header,
    write_file,
)
from pat_jax.models.hf_tensors import usual_names
from pat_jax.models.lora import Adapter, Adapters, Lora
from pat_jax.models.policy import Policy

ADAPTER_FILE = "adapter_model.safetensors"
# Modules that may have an adapter in PEFT, but not here.
_NOT_ADAPTED = ("model.embed_tokens", "lm_head")
# The part of a tensor's name that names the adapter, in files with PEFT's names in memory.
_NAMED = re.compile(r"(?:\.modules_to_save)?\.default(?=\.(?:weight|bias)$)")

# Fields that we write because older versions of PEFT need them.
_PLAIN: Mapping[str, object] = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_dropout": 0.0,
    "inference_mode": True,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def export_adapter(directory: str | Path, lora: Lora, adapters: Adapters, base: str | Path) -> None:
    """Writes adapters, and a scalar head, in float32; the directory appears once it is complete.

    Args:
      base: the checkpoint that the adapters belong to, a directory or a name of the Hub; it is
        named in their configuration.
    """
    check_export(directory)
    of_experts = [name for name in lora.modules if is_of_experts(lora.policy, name)]
    model = lora.policy.config
    fields = {
        **_PLAIN,
        "task_type": TASKS[model.head, model.head_bias],
        MODULES_TO_SAVE: list(HEAD_MODULES) if model.head == "scalar" else None,
        "base_model_name_or_path": str(Path(base).absolute()) if Path(base).is_dir() else str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [name for name in lora.modules if name not in of_experts],
    }
    if of_experts:
        fields[TARGET_PARAMETERS] = [parameter(name) for name in of_experts]
    if lora.doubles_gate_up:
        fields["rank_pattern"] = {GATE_UP: 2 * lora.rank}
        fields["alpha_pattern"] = {GATE_UP: 2 * lora.alpha}
    unpadded = lora.unpadded
    shapes: dict[str, Shape] = {}
    for name in adapters:
        shapes |= _shapes(name, lora, unpadded[name])

    def arrays() -> Iterator[np.ndarray]:
        for name, adapter in adapters.items():
            host = jax.tree.map(
                lambda x, shape: np.asarray(x)[tuple(map(slice, shape))], adapter, unpadded[name]
            )
            yield from to_stored(name, host) if isinstance(host, Adapter) else [host]

    with appearing_at_once(Path(directory)) as partial:
        write_json(partial / ADAPTER_CONFIG, fields)
        write_file(partial / ADAPTER_FILE, shapes, np.dtype(np.float32), arrays())


def read_adapter(directory: str | Path, policy: Policy) -> Lora:
    """Returns the modules, rank and alpha of a directory's adapters, and checks all their tensors.
    Raises UserError if there are none, or if they are of an unknown kind or of another model."""
    is_scalar = policy.config.head == "scalar"
    linear = linear_modules(policy)
    config = read_peft_config(directory, HEAD_MODULES if is_scalar else ())
    stored = _stored_tensors(Path(directory), policy)
    named = of_wrappers(x for x in linear if config.has_parameter(parameter(x)))
    wrappers = {name.removeprefix(PREFIX).removesuffix(A).removesuffix(B) for name in stored}
    wrappers -= {name.removeprefix(PREFIX) for name in HEAD}
    modules = {named.get(name, name) for name in wrappers}
    _check_modules(Path(directory), modules - set(linear), policy)
    lora = Lora(
        policy,
        int(config.fields["r"]),
        float(config.fields["lora_alpha"]),
        tuple(x for x in linear if x in modules),
        config.doubles_gate_up and any(x.endswith(".gate_up_proj") for x in modules),
    )
    _check_tensors(Path(directory), lora, stored)
    return lora


def load_adapter(directory: str | Path, lora: Lora, shardings: Adapters | None = None) -> Adapters:
    """Returns in float32 the adapters and scalar head that `read_adapter` found (`lora`). Raises
    UserError if a tensor has values that are not finite."""
    stored = _stored_tensors(Path(directory), lora.policy)
    abstract = lora.abstract_params
    unpadded = lora.unpadded

    def read(name: str) -> np.ndarray:
        array = np.array(stored[name].view(), dtype=np.float32)
        stored[name].check_finite(array)
        return array

    def padded(like: jax.Array, array: np.ndarray) -> np.ndarray:
        behind = [(0, full - part) for full, part in zip(like.shape, array.shape, strict=True)]
        return np.pad(array, behind)

    loaded: Adapters = {}
    for module, like in abstract.items():
        host, *b = map(read, _shapes(module, lora, unpadded[module]))
        if isinstance(like, Adapter):
            host = from_stored(module, host, b[0], unpadded[module])
            host = jax.tree.map(padded, like, host)
        loaded[module] = jax.device_put(host, shardings[module] if shardings else None)
    return loaded


def _shapes(module: str, lora: Lora, unpadded: Adapter | Shape) -> dict[str, Shape]:
    """Returns the shapes of a module's tensors A and B, or of a scalar head's tensor, by name."""
    if not isinstance(unpadded, Adapter):
        weight, bias = HEAD
        return {bias if module.endswith(".bias") else weight: unpadded}
    name = PREFIX + wrapper(module, lora.modules)
    a, b = stored_shapes(module, unpadded)
    return {name + A: a, name + B: b}


def _stored_tensors(directory: Path, policy: Policy) -> dict[str, StoredTensor]:
    """Returns the file's tensors by name. PEFT's prefix is added to names that lack it; the
    adapter's name, which a few files have in them, is removed."""
    path = directory / ADAPTER_FILE
    if not path.is_file():
        raise UserError(
            f"{directory}: there is no {ADAPTER_FILE}, expected it beside {ADAPTER_CONFIG}; save the "
            "adapter with safe_serialization=True."
        )
    header = read_header(path)
    usual = usual_names(name.removeprefix(PREFIX) for name in header)
    stored = {
        PREFIX + _NAMED.sub("", usual[name.removeprefix(PREFIX)]): tensor
        for name, tensor in header.items()
    }
    if not stored or len(stored) < len(header):
        twice = f"the same tensors with and without '.default' or '{PREFIX}'"
        what = twice if stored else "no tensor"
        raise UserError(
            f"{path}: the file holds {what}, expected {A[1:]} and {B[1:]} of each layer; save the "
            "adapter again."
        )
    whole = HEAD if policy.config.head == "scalar" else ()
    for name, tensor in stored.items():
        if name not in whole and not name.endswith((A, B)):
            raise _not_implemented(path, tensor.name)
    return stored


def _check_modules(directory: Path, unknown: Set[str], policy: Policy) -> None:
    """Raises UserError if there are modules in `unknown`, which cannot have an adapter here."""
    for module in sorted(unknown):
        if policy.config.experts is not None and re.search(r"\.(mlp|block_sparse_moe)\.", module):
            raise UserError(
                f"{directory / ADAPTER_FILE}: it has an adapter of {module!r}, expected those of attention, and of "
                f"experts and routers as PEFT 0.21 names them in {TARGET_PARAMETERS} with transformers 5, while no "
                "MLP beside experts has one; load it there and save it again, or choose another."
            )
        if module in _NOT_ADAPTED:
            raise _not_implemented(directory / ADAPTER_FILE, f"{PREFIX}{module}{A}")
        raise _of_another_model(
            directory, f"it has an adapter of {module!r}, the model no such layer"
        )


def _check_tensors(directory: Path, lora: Lora, stored: Mapping[str, StoredTensor]) -> None:
    for module, adapter in lora.unpadded.items():
        for name, wanted in _shapes(module, lora, adapter).items():
            if name not in stored:
                expected = f"{A[1:]} and {B[1:]} of each layer; save the adapter again."
                if name in HEAD:
                    task = TASKS["scalar", lora.policy.config.head_bias]
                    expected = f"the model's scalar head; save the adapter with task_type {task!r}."
                raise UserError(
                    f"{directory / ADAPTER_FILE}: tensor {name!r} is missing, expected {expected}"
                )
            if (found := stored[name].shape) != wanted:
                what = f"{name!r} is {found}, {wanted} by the model and rank {lora.rank}"
                raise _of_another_model(directory, what)
            if stored[name].dtype_name not in DTYPES:
                raise UserError(
                    f"{directory / ADAPTER_FILE}: tensor {name!r} has type {stored[name].dtype_name}, "
                    f"expected one of {', '.join(DTYPES)}; save the adapter in one of them."
                )


def _not_implemented(path: Path, name: str) -> UserError:
    return UserError(
        f"{path}: tensor {shown(name)} is no {A[1:]} or {B[1:]} of a linear layer, expected nothing "
        "else: adapters of embed_tokens or lm_head, added tokens, biases and whole weights are not "
        "implemented; choose an adapter without them."
    )


def _of_another_model(directory: str | Path, why: str) -> UserError:
    return UserError(
        f"the adapter in {directory} is of another model than --model: {why}; give the model that "
        f"{ADAPTER_CONFIG} names."
    )
