"""Adapters in the format of PEFT: a directory with adapter_config.json and adapter_model.safetensors.

Everything that can be wrong with one is found from the configuration and the file's header, before any
tensor is read.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

import jax
import numpy as np

from pat_jax.common.errors import UserError, shown
from pat_jax.models.hf_config import read_json_object
from pat_jax.models.hf_export import appearing_at_once, check_export, write_json
from pat_jax.models.lora import Adapter, Adapters, Lora, linear_layers
from pat_jax.models.policy import Policy
from pat_jax.models.safetensors_file import DTYPES, StoredTensor, read_header, write_file

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PEFT wraps the model twice
_A, _B = ".lora_A.weight", ".lora_B.weight"

# Fields that change what is computed, with the one value that is implemented. Absent means that value.
_ONLY_VALUES: Mapping[str, object] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}


def export_adapter(directory: str | Path, lora: Lora, adapters: Adapters, base: str | Path) -> None:
    """Writes adapters in float32; the directory appears once it is complete.

    Args:
      base: the checkpoint directory that they belong to, named in their configuration.
    """
    check_export(directory)
    fields = {
        **_ONLY_VALUES,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.modules),
        "inference_mode": True,
    }
    stored = {
        _PREFIX + name + suffix: x
        for name, adapter in adapters.items()
        for suffix, x in ((_A, adapter.a), (_B, adapter.b))
    }
    shapes = {name: _stored_shape(name, x.shape) for name, x in stored.items()}
    arrays = (np.asarray(x).reshape(shapes[name]) for name, x in stored.items())
    with appearing_at_once(Path(directory)) as partial:
        write_json(partial / ADAPTER_CONFIG, fields)
        write_file(partial / ADAPTER_FILE, shapes, np.dtype(np.float32), arrays)


def read_adapter(directory: str | Path, policy: Policy) -> Lora:
    """What adapters a directory has, once every tensor is seen to belong to `policy`.

    Raises:
      UserError: it is no adapter directory, is of a kind that is not known, or of another model.
    """
    path = Path(directory) / ADAPTER_CONFIG
    if not path.is_file():
        raise UserError(
            f"{directory}: there is no {ADAPTER_CONFIG}, expected the directory of a PEFT adapter; check "
            "the path."
        )
    fields = read_json_object(path)
    for name, value in _ONLY_VALUES.items():
        if fields.get(name, value) not in (value, None):
            raise UserError(
                f"{path}: field '{name}' is {shown(fields[name])}, expected {value!r}: other adapters "
                "are not implemented; choose one without it."
            )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if not _is_number(rank) or not float(rank).is_integer() or not _is_number(alpha):
        raise UserError(
            f"{path}: fields 'r' and 'lora_alpha' are {shown(rank)} and {shown(alpha)}, expected an integer "
            "and a number above 0; save the adapter again."
        )
    stored = _stored_tensors(Path(directory))
    modules = {name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B) for name in stored}
    linear = linear_layers(policy)
    if foreign := sorted(modules - linear.keys()):
        raise _of_another_model(
            directory, f"it has an adapter of {foreign[0]!r}, the model no such layer"
        )
    lora = Lora(policy, int(rank), float(alpha), tuple(x for x in linear if x in modules))
    _check_tensors(Path(directory), lora, stored)
    return lora


def load_adapter(directory: str | Path, lora: Lora, shardings: Adapters | None = None) -> Adapters:
    """The adapters that `read_adapter` has found there, float32."""
    stored, abstract = _stored_tensors(Path(directory)), lora.abstract_params

    def read(name: str, like: jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
        array = np.array(stored[name].view(), dtype=np.float32).reshape(like.shape)
        return jax.device_put(array, sharding)

    loaded: Adapters = {}
    for module, like in abstract.items():
        a, b = (shardings[module].a, shardings[module].b) if shardings else (None, None)
        name = _PREFIX + module
        loaded[module] = Adapter(
            read(name + _A, like.a, a),
            read(name + _B, like.b, b),
        )
    return loaded


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    path = directory / ADAPTER_FILE
    if not path.is_file():
        raise UserError(
            f"{directory}: there is no {ADAPTER_FILE}, expected it beside {ADAPTER_CONFIG}; save the "
            "adapter with safe_serialization=True."
        )
    return read_header(path)


def _check_tensors(directory: Path, lora: Lora, stored: Mapping[str, StoredTensor]) -> None:
    for module, adapter in lora.abstract_params.items():
        for suffix, like in ((_A, adapter.a), (_B, adapter.b)):
            name = _PREFIX + module + suffix
            wanted = _stored_shape(name, like.shape)
            found = stored[name].shape if name in stored else "missing"
            if found != wanted:
                what = f"{name!r} is {found}, {wanted} by the model and rank {lora.rank}"
                raise _of_another_model(directory, what)
            if stored[name].dtype_name not in DTYPES:
                raise UserError(
                    f"{directory / ADAPTER_FILE}: tensor {name!r} has type {stored[name].dtype_name}, "
                    f"expected one of {', '.join(DTYPES)}; save the adapter in one of them."
                )


def _stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """[rank, in] or [out, rank], as PEFT has them."""
    if name.endswith(_A):
        return (shape[0], math.prod(shape[1:]))
    return (math.prod(shape[:-1]), shape[-1])


def _of_another_model(directory: str | Path, why: str) -> UserError:
    return UserError(
        f"the adapter in {directory} is of another model than --model: {why}; give the model that "
        f"{ADAPTER_CONFIG} names."
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30
