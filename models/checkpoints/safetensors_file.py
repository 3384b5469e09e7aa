"""Reads and writes safetensors files: checks headers, maps tensors, writes tensor by tensor.

The format is eight bytes of header length, a JSON header (name -> dtype, shape, data_offsets) and
the tensors' bytes, little-endian, back to back. Reading maps one tensor at a time and copies
nothing. Writing holds one tensor at a time; the safetensors library needs all tensors of a file.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

from pat_jax.common.errors import UserError, shown
from pat_jax.common.json_text import JsonError, parse_json

DTYPES: Mapping[str, np.dtype] = {
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_LENGTH_BYTES = 8
_ALIGNMENT = 64  # alignment of the first tensor written: a cache line
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ADVICE = "download or export the file again"


@dataclass(frozen=True)
class StoredTensor:
    path: Path
    name: str  # the tensor's name in the file
    dtype_name: str  # dtype in the header: a key of DTYPES, or a type that is not supported here
    shape: tuple[int, ...]
    offset: int  # offset of the tensor's first byte in the file

    def view(self) -> np.ndarray:
        """Returns the tensor as a memory map: bytes are read when it is indexed."""
        return np.memmap(self.path, DTYPES[self.dtype_name], "r", self.offset, self.shape)

    def check_finite(self, values: np.ndarray) -> None:
        """Raises UserError if some of the `values` read from this tensor are not finite. Comparing
        their bits as integers is faster than isfinite, and takes no memory."""
        infinite = np.array([np.inf, -np.inf], values.dtype)
        signed, unsigned = (f"{kind}{values.itemsize}" for kind in "iu")
        most = [values.view(kind).max(initial=0) for kind in (signed, unsigned)]
        if most[0] >= infinite.view(signed)[0] or most[1] >= infinite.view(unsigned)[1]:
            raise UserError(
                f"{self.path}: tensor {self.name!r} has numbers that are not finite as {values.dtype}, expected those "
                "of a trained model; save it again from before its training diverged, or download it again."
            )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of the file by name, after checking the header against the file's size.
    Raises UserError if the file is truncated, damaged or no safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        if prefix == b"version ":  # a Git LFS pointer, which a clone without LFS leaves
            raise UserError(
                f"{path}: the file is a Git LFS pointer, expected the tensors; run `git lfs pull`."
            )
        length = int.from_bytes(prefix, "little")
        if len(prefix) < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise UserError(
                f"{path}: the header says it is {length} bytes long in a file of {size} bytes, expected it to end "
                f"inside the file, so the file is truncated or no safetensors file; {_ADVICE}."
            )
        header = _parse_header(path, file.read(length))
    data_start = _LENGTH_BYTES + length
    expected = data_start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        raise UserError(
            f"{path}: the file has {size} bytes, expected {expected} by its header, "
            f"so it is truncated or damaged; {_ADVICE}."
        )
    return {
        name: StoredTensor(
            path, name, entry["dtype"], tuple(entry["shape"]), data_start + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }


def _parse_header(path: Path, text: bytes) -> dict[str, dict[str, Any]]:
    try:
        header = parse_json(text.decode("utf-8"))
    except (JsonError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: the header is not JSON, expected a safetensors file; {_ADVICE}."
        ) from error
    if not isinstance(header, dict):
        raise UserError(
            f"{path}: the header is no JSON object, expected a safetensors file; {_ADVICE}."
        )
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not _is_sound(entry):
            raise UserError(
                f"{path}: the header's entry of tensor '{name}' is {shown(entry)}, expected a dtype, a shape "
                f"and data_offsets that agree; {_ADVICE}."
            )
    _check_places(path, header)
    return header


def _check_places(path: Path, header: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UserError unless tensors lie back to back: overlapping ones would be misread."""
    end = 0
    former = "the header"
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, next_end = entry["data_offsets"]
        if begin != end:
            raise UserError(
                f"{path}: tensor '{name}' begins at byte {shown(begin)} of the data, expected {shown(end)}, "
                f"where {former} ends; {_ADVICE}."
            )
        end = next_end
        former = f"tensor '{name}'"


def _is_sound(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _are_lengths(shape) or not _are_lengths(offsets) or len(offsets) != 2:
        return False
    num_bytes = offsets[1] - offsets[0]
    if entry["dtype"] not in DTYPES:
        return num_bytes >= 0
    return num_bytes == math.prod(shape) * DTYPES[entry["dtype"]].itemsize


def _are_lengths(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: jnp.dtype,
    arrays: Iterable[np.ndarray],
) -> None:
    """Writes one file, tensor by tensor.

    Args:
      shapes: shape of each tensor by name.
      arrays: the tensors in the order of `shapes`; each is dropped once it is written.
    """
    dtype_name = next(name for name, known in DTYPES.items() if known == dtype)
    header: dict[str, object] = {
        "__metadata__": {"format": "pt"}
    }  # transformers refuses files without it
    end = 0
    for name, shape in shapes.items():
        start = end
        end = end + math.prod(shape) * DTYPES[dtype_name].itemsize
        header[name] = {"dtype": dtype_name, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for shape, array in zip(shapes.values(), arrays, strict=True):
            assert (array.shape, array.dtype) == (shape, dtype)
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
