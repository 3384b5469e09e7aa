"""Reads and writes safetensors files: maps tensors, and writes tensor by tensor.

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

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from pat_jax.common.errors import UserError, shown

DTYPES: Mapping[str, np.dtype] = {
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_LENGTH_BYTES = 8
_ALIGNMENT = 64  # alignment of the first tensor written: a cache line


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
    """Returns every tensor of the file by name, after the library has checked the header and size.
    Raises UserError if the file is truncated, damaged or no safetensors file."""
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        if prefix == b"version ":  # a Git LFS pointer, which a clone without LFS leaves
            raise UserError(
                f"{path}: the file is a Git LFS pointer, expected the tensors; run `git lfs pull`."
            )
        try:
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:  # of an empty file, OSError
            raise UserError(
                f"{path}: the file is truncated, damaged or no safetensors file, expected tensors back to back as "
                f"its header says ({shown(str(error))}); download or export the file again."
            ) from error
        length = int.from_bytes(prefix, "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + length
    return {
        name: StoredTensor(
            path, name, entry["dtype"], tuple(entry["shape"]), data_start + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }


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
