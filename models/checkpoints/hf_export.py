"""Writes parameters as a Hugging Face directory that transformers and the serving engines load."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.common.json_text import read_json_object
from pat_jax.common.pytree import on_host
from pat_jax.models.adapted_weight import AdaptedWeight, is_adapted
from pat_jax.models.checkpoints.hf_config import CONFIG_FILE, to_hf_config
from pat_jax.models.checkpoints.hf_files import INDEX_FILE, WEIGHTS_FILE
from pat_jax.models.checkpoints.safetensors_file import write_file
from pat_jax.models.hf_tensors import HFTensor, hf_tensors
from pat_jax.models.policy import Params, Policy

MAX_SHARD_BYTES = 5_000_000_000

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SPECIAL_TOKENS = ("tokenizer_config.json", "special_tokens_map.json")
_COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def check_export(directory: str | Path, tokenizer_dir: str | Path | None = None) -> None:
    """Raises UserError if `export` would refuse, so that a run can fail before it starts."""
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise UserError(
            f"{directory}: this is a file, expected a directory to export to; choose another name."
        )
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(
            f"{directory}: the directory is not empty, expected a new or empty one to export to; "
            f"choose another name or remove it."
        )
    existing = next(parent for parent in directory.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(
            f"{existing}: nothing can be written there, expected a writable directory to export under."
        )
    if tokenizer_dir is not None and not Path(tokenizer_dir).is_dir():
        raise UserError(
            f"{tokenizer_dir}: there is no such directory, expected one with tokenizer files to copy."
        )


def export(
    directory: str | Path,
    policy: Policy,
    params: Params,
    dtype: jnp.dtype,
    tokenizer_dir: str | Path | None = None,
    *,
    padding: tuple[int, str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes config.json and safetensors in `dtype`; the directory appears once it is complete.

    Adapters are merged into their weights, one at a time. The host holds about two tensors at once;
    each expert has its own tensor. If there are several processes, one calls this function, and
    the others must call `attend`.

    Args:
      tokenizer_dir: the checkpoint or tokenizer directory that the run started from. Its tokenizer
        files and generation_config.json are copied, and special token ids of its config.json kept.
      padding: id and text of the padding token to write in these files; "" if it has no text.

    Raises:
      UserError: see `check_export`.
    """
    check_export(directory, tokenizer_dir)
    with appearing_at_once(Path(directory)) as partial:
        fields = to_hf_config(policy.config, dtype)
        if tokenizer_dir is not None:
            fields |= _token_ids(Path(tokenizer_dir))
            for name in _COPIED_FILES:
                if (Path(tokenizer_dir) / name).is_file():
                    shutil.copyfile(Path(tokenizer_dir) / name, partial / name)
        if padding is not None:
            fields["pad_token_id"], text = padding
            for path in (partial / name for name in _SPECIAL_TOKENS if text):
                named = read_json_object(path) if path.is_file() else {}
                write_json(path, named | {"pad_token": text})
        write_json(partial / CONFIG_FILE, fields)
        _write_weights(partial, policy, params, np.dtype(dtype), max_shard_bytes)


def attend(policy: Policy, params: Params, dtype: jnp.dtype) -> None:
    """Takes part in an export that another process writes: all processes gather every tensor."""
    for tensor in _stored(policy, params):
        tensor.on_host(np.dtype(dtype))


@dataclass(frozen=True)
class _Stored:
    """One tensor to write, and the array that holds its values."""

    name: str
    tensor: HFTensor
    array: jax.Array | AdaptedWeight
    expert: int | None  # the expert whose part of the array is written, or None for the whole array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.stored_shape

    def num_bytes(self, dtype: np.dtype) -> int:
        return math.prod(self.shape) * dtype.itemsize

    def on_host(self, dtype: np.dtype) -> np.ndarray:
        array = self.array
        if self.expert is not None:
            array = jax.tree.map(lambda x: _of_expert(x, self.expert), array)
        if isinstance(array, AdaptedWeight):
            array = _merged(array)
        elif self.expert is None:
            # An array keeps its host copy once it has been read: read a temporary copy, not the
            # parameter.
            array = jax.device_put(array, array.sharding, may_alias=False)
        return np.array(self.tensor.to_stored(on_host(array)), dtype=dtype, order="C")


_merged = jax.jit(AdaptedWeight.merged)


@jax.jit
def _of_expert(stack: jax.Array, expert: int) -> jax.Array:
    """Returns one expert's part of the stack.

    If the stack is split over devices, the compiler gathers it by a sum. Bits are summed here: a
    sum of numbers loses the sign of a zero."""
    bits = stack.view(f"uint{8 * stack.dtype.itemsize}")
    return jnp.take(bits, expert, axis=0, mode="clip").view(stack.dtype)


def _stored(policy: Policy, params: Params) -> list[_Stored]:
    """Lists the policy's tensors in the order in which they are written."""
    leaves = jax.tree.leaves(params, is_leaf=is_adapted)
    return [
        _Stored(name, tensor, array, i if tensor.is_stack else None)
        for tensor, array in zip(jax.tree.leaves(hf_tensors(policy)), leaves, strict=True)
        for i, name in enumerate(tensor.names)
    ]


def _token_ids(source: Path) -> dict[str, object]:
    if not (source / CONFIG_FILE).is_file():
        return {}
    fields = read_json_object(source / CONFIG_FILE)
    return {name: fields[name] for name in _TOKEN_IDS if name in fields}


@contextmanager
def appearing_at_once(directory: Path) -> Iterator[Path]:
    """Yields a temporary directory, renamed to `directory` on success and removed on failure."""
    partial = directory.absolute().with_name(f".{directory.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(directory)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    directory: Path, policy: Policy, params: Params, dtype: np.dtype, max_shard_bytes: int
) -> None:
    tensors = _stored(policy, params)
    files = _split_files(tensors, dtype, max_shard_bytes)
    for name, members in files.items():
        shapes = {tensor.name: tensor.shape for tensor in members}
        write_file(directory / name, shapes, dtype, (tensor.on_host(dtype) for tensor in members))
    if len(files) > 1:
        total_size = sum(tensor.num_bytes(dtype) for tensor in tensors)
        weight_map = {tensor.name: name for name, members in files.items() for tensor in members}
        write_json(
            directory / INDEX_FILE,
            {"metadata": {"total_size": total_size}, "weight_map": weight_map},
        )


def _split_files(
    tensors: list[_Stored], dtype: np.dtype, max_bytes: int
) -> dict[str, list[_Stored]]:
    """Splits the tensors, in order, into files of at most `max_bytes` or of one larger tensor."""
    groups: list[list[_Stored]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.num_bytes(dtype) > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes(dtype)
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    return {
        f"model-{i:05}-of-{len(groups):05}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }
