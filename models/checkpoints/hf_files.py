"""Finds the tensors of a checkpoint directory: in which files they are, and under which names.

Knows files, their headers and the index. Does not know any model.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pat_jax.common.errors import UserError
from pat_jax.models.checkpoints.hf_tensors import usual_names
from pat_jax.models.checkpoints.json_fields import read_json_object
from pat_jax.models.checkpoints.safetensors_file import StoredTensor, read_header

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FORMATS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
_MOST_TOLD = 3  # names in a message

Tensors = dict[str, StoredTensor]  # by the names that transformers gives them


@dataclass(frozen=True)
class CheckpointFiles:
    directory: Path
    named: Tensors  # those of the one file, or of the index
    stale: Mapping[str, str]  # the other entries of the index, whose file lacks the tensor

    def spare(self) -> tuple[Tensors, Tensors]:
        """Returns the tensors that are not named: parts of the checkpoint, and all others.

        A file that has a named tensor, too, is another version of the checkpoint and no part of it.
        If two files have the same tensor, nothing says which one is a part.
        """
        files, (parts, others) = {x.path for x in self.named.values()}, (Tensors(), Tensors())
        for path in sorted(self.directory.glob("*.safetensors")):
            with suppress(UserError):  # a damaged file may have nothing to do with the model
                header = _by_name(read_header(path))
                is_part = path in files or not header.keys() & self.named.keys()
                for name in header.keys() - self.named.keys():
                    (parts if is_part and name not in parts else others)[name] = header[name]
        return {name: x for name, x in parts.items() if name not in others}, others


def told(tensors: Tensors) -> str:
    """Returns the first tensors in words, by their names in the files."""
    few = sorted(tensors.values(), key=lambda x: x.name)[:_MOST_TOLD]
    words = ", ".join(f"'{x.name}' with shape {list(x.shape)} in {x.path.name}" for x in few)
    return f"{words} and {len(tensors) - len(few):,} more" if len(tensors) > len(few) else words


def find_tensors(directory: Path) -> CheckpointFiles:
    """Returns the tensors of `model.safetensors`, else those of the index.

    Raises:
      UserError: there is neither, or a file is missing or damaged.
    """
    if (directory / WEIGHTS_FILE).is_file():
        return CheckpointFiles(directory, _by_name(read_header(directory / WEIGHTS_FILE)), {})
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        others = sorted(path.name for path in directory.iterdir() if path.suffix in _FORMATS)
        there = f" and not {', '.join(others[:_MOST_TOLD])}" if others else ""
        raise UserError(
            f"{directory}: there is neither {WEIGHTS_FILE} nor {INDEX_FILE}, expected one of them{there}; "
            "download it, or convert other formats with transformers' save_pretrained."
        )
    weight_map = _weight_map(index_path)
    headers = {name: _shard_header(index_path, name) for name in sorted(set(weight_map.values()))}
    named = {x: headers[file][x] for x, file in weight_map.items() if x in headers[file]}
    stale = {x: file for x, file in weight_map.items() if x not in named}
    return CheckpointFiles(directory, _by_name(named), stale)


def _by_name(tensors: Tensors) -> Tensors:
    usual = usual_names(tensors)
    return {usual[name]: tensor for name, tensor in tensors.items()}


def _weight_map(index_path: Path) -> dict[str, str]:
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        _is_file_name(name) for name in weight_map.values()
    ):
        raise UserError(
            f"{index_path}: field 'weight_map' is missing or damaged, expected an object from tensor names to "
            f"names of files beside it; download the file again."
        )
    return weight_map


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and value == Path(value).name != ""


def _shard_header(index_path: Path, name: str) -> dict[str, StoredTensor]:
    path = index_path.parent / name
    if not path.is_file():
        raise UserError(
            f"{path}: the file is missing, expected by {index_path.name}; download it too."
        )
    return read_header(path)
