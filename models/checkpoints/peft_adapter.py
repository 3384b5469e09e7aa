"""Adapters in the format of PEFT: a directory with adapter_config.json and
adapter_model.safetensors.

Everything that can be wrong with one is found from the configuration and the file's header, before
any tensor is read.
"""

import math
import re
from collections.abc import Mapping, Set
from pathlib import Path

import jax
import numpy as np

from pat_jax.common.errors import UserError, shown
from pat_jax.models.checkpoints.hf_export import appearing_at_once, check_export, write_json
from pat_jax.models.checkpoints.peft_config import (
    ADAPTER_CONFIG,
    NOT_ADAPTED,
    PeftConfig,
    read_peft_config,
)
from pat_jax.models.checkpoints.safetensors_file import (
    DTYPES,
    StoredTensor,
    read_header,
    write_file,
)
from pat_jax.models.lora import Adapter, Adapters, Lora, is_beside_attention, linear_layers
from pat_jax.models.policy import Policy

ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PEFT wraps the model twice
_A, _B = ".lora_A.weight", ".lora_B.weight"
_NAMED = re.compile(
    r"(\.lora_[AB])\.default\.weight$"
)  # by the adapter's name, as PEFT has it in memory

# Fields of an adapter that we write, as older versions of PEFT want them.
_PLAIN: Mapping[str, object] = {
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
      base: the checkpoint that they belong to, a directory or a name of the Hub, named in their
        configuration.
    """
    check_export(directory)
    fields = {
        **_PLAIN,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()) if Path(base).is_dir() else str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.modules),
        "inference_mode": True,
    }
    unpadded = lora.unpadded
    stored = {
        _PREFIX + name + suffix: np.asarray(x)[tuple(map(slice, shape))]
        for name, adapter in adapters.items()
        for suffix, x, shape in (
            (_A, adapter.a, unpadded[name].a),
            (_B, adapter.b, unpadded[name].b),
        )
    }
    shapes = {name: _stored_shape(name, x.shape) for name, x in stored.items()}
    arrays = (x.reshape(shapes[name]) for name, x in stored.items())
    with appearing_at_once(Path(directory)) as partial:
        write_json(partial / ADAPTER_CONFIG, fields)
        write_file(partial / ADAPTER_FILE, shapes, np.dtype(np.float32), arrays)


def read_adapter(directory: str | Path, policy: Policy) -> Lora:
    """What adapters a directory has, once every tensor is seen to belong to `policy`.

    Raises:
      UserError: it is not an adapter directory, of an unknown kind, or of another model.
    """
    config, linear = read_peft_config(directory), linear_layers(policy)
    stored = _stored_tensors(Path(directory))
    modules = {name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B) for name in stored}
    _check_modules(Path(directory), modules, linear, policy)
    _check_targets(config, modules, linear)
    lora = Lora(policy, config.rank, config.alpha, tuple(x for x in linear if x in modules))
    _check_tensors(Path(directory), lora, stored)
    return lora


def load_adapter(directory: str | Path, lora: Lora, shardings: Adapters | None = None) -> Adapters:
    """The adapters that `read_adapter` has found there, float32."""
    stored, abstract = _stored_tensors(Path(directory)), lora.abstract_params
    unpadded = lora.unpadded

    def read(
        name: str,
        like: jax.Array,
        shape: tuple[int, ...],
        sharding: jax.sharding.Sharding | None,
    ) -> jax.Array:
        array = np.array(stored[name].view(), dtype=np.float32).reshape(shape)
        if not np.isfinite(array).all():
            raise UserError(
                f"{stored[name].path}: tensor {name!r} has numbers that are not finite, expected those of a "
                "trained adapter; save it again from before its training diverged."
            )
        behind = [(0, whole - part) for whole, part in zip(like.shape, shape, strict=True)]
        return jax.device_put(np.pad(array, behind), sharding)

    loaded: Adapters = {}
    for module, like in abstract.items():
        a, b = (shardings[module].a, shardings[module].b) if shardings else (None, None)
        name = _PREFIX + module
        loaded[module] = Adapter(
            read(name + _A, like.a, unpadded[module].a, a),
            read(name + _B, like.b, unpadded[module].b, b),
        )
    return loaded


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """By names without an adapter's own, which PEFT leaves out of most files."""
    path = directory / ADAPTER_FILE
    if not path.is_file():
        raise UserError(
            f"{directory}: there is no {ADAPTER_FILE}, expected it beside {ADAPTER_CONFIG}; save the "
            "adapter with safe_serialization=True."
        )
    header = read_header(path)
    stored = {_NAMED.sub(r"\1.weight", name): tensor for name, tensor in header.items()}
    if not stored or len(stored) < len(header):
        what = "no tensor" if not stored else "the same tensors with and without '.default'"
        raise UserError(
            f"{path}: the file holds {what}, expected {_A[1:]} and {_B[1:]} of each layer; save the "
            "adapter again."
        )
    for name in stored:
        if not (name.startswith(_PREFIX) and name.endswith((_A, _B))):
            raise _not_implemented(path, name)
    return stored


def _check_modules(
    directory: Path, modules: Set[str], linear: Mapping[str, int], policy: Policy
) -> None:
    """UserError for the first that has no adapter here."""
    for module in sorted(modules - linear.keys()):
        if is_beside_attention(policy, module):
            raise UserError(
                f"{directory / ADAPTER_FILE}: it has an adapter of {module!r}, expected those of attention alone: "
                "of experts, their routers and MLPs beside them adapters are not implemented; choose one without."
            )
        if module in NOT_ADAPTED:
            raise _not_implemented(directory / ADAPTER_FILE, f"{_PREFIX}{module}{_A}")
        raise _of_another_model(
            directory, f"it has an adapter of {module!r}, the model no such layer"
        )


def _check_targets(config: PeftConfig, modules: Set[str], linear: Mapping[str, int]) -> None:
    """PEFT gives each target an adapter, that of the file or a new one, and leaves out all others."""
    targets = config.targets(linear)
    if targets is None or targets == modules:
        return
    if missing := sorted(targets - modules):
        expected = f"layers that {ADAPTER_FILE} has tensors of, and it has none of {missing[0]!r}"
    else:
        more = min(modules - targets)
        expected = (
            f"{more!r} among the layers that it, 'exclude_modules' and 'layers_to_transform' choose, as "
            f"{ADAPTER_FILE} has tensors of it"
        )
    raise config.error("target_modules", expected, "save the adapter again")


def _check_tensors(directory: Path, lora: Lora, stored: Mapping[str, StoredTensor]) -> None:
    for module, adapter in lora.unpadded.items():
        for suffix, shape in ((_A, adapter.a), (_B, adapter.b)):
            name = _PREFIX + module + suffix
            wanted = _stored_shape(name, shape)
            if name not in stored:
                raise UserError(
                    f"{directory / ADAPTER_FILE}: tensor {name!r} is missing, expected {_A[1:]} and {_B[1:]} "
                    "of each layer; save the adapter again."
                )
            if (found := stored[name].shape) != wanted:
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


def _not_implemented(path: Path, name: str) -> UserError:
    return UserError(
        f"{path}: tensor {shown(name)} is no {_A[1:]} or {_B[1:]} of a linear layer, expected nothing "
        "else: adapters of embed_tokens or lm_head, added tokens, biases and whole weights are not "
        "implemented; choose an adapter without them."
    )


def _of_another_model(directory: str | Path, why: str) -> UserError:
    return UserError(
        f"the adapter in {directory} is of another model than --model: {why}; give the model that "
        f"{ADAPTER_CONFIG} names."
    )
