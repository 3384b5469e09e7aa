"""Finds the tensors of a checkpoint directory: in which files they are, and under which names.

Knows files, their headers and the index. Does not know any model.
"""

import re
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pat_jax.common.errors import UserError
from pat_jax.common.json_text import read_json_object
from pat_jax.models.checkpoints.safetensors_file import StoredTensor, read_header
from pat_jax.models.hf_tensors import LM_HEAD, usual_names

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FORMATS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
_MOST_TOLD = 3  # largest number of tensor names in a message
_ROTARY_BUFFER = "rotary_emb.inv_freq"  # computed from the configuration; old versions stored it
# Names of a shard's or a head's file; and of tensors in layers, adapters and optimizer states.
_PART = re.compile(r"(pytorch_)?model[-_]\d.*|((lm|v|value|reward)[-_])?head|score|classifier")
NO_HEAD = re.compile(r"(^|[._])(lora_|exp_avg|(layers|base_model|state|optim\w*|moment\w*)\.)")

Tensors = dict[str, StoredTensor]  # by the names that transformers gives them


@dataclass(frozen=True)
class CheckpointFiles:
    directory: Path
    named: Tensors  # the tensors of the one file, or those that the index lists
    stale: Mapping[str, str]  # entries of the index (tensor: file) whose file lacks the tensor

    def spare(self, known: Set[str]) -> tuple[Tensors, Tensors]:
        """Returns the tensors that are not in `named`: those of this checkpoint, and all others.

        A further file belongs to this checkpoint if its name says so, and if all its tensors are
        `known` or may be a head. A file that repeats a tensor of `named` is another version of the
        checkpoint. A tensor that is in two files is among the others: either may be wrong.
        """
        files, names = ({getattr(x, y) for x in self.named.values()} for y in ("path", "name"))
        parts = Tensors()
        others = Tensors()
        twice = set[str]()
        for path in sorted(self.directory.glob("*.safetensors")):
            with suppress(UserError):  # a damaged file may have nothing to do with the model
                tensors = _by_name(read_header(path), () if path in files else names)
                new = unused(tensors, self.named.keys())
                is_new = _PART.fullmatch(path.stem) and tensors.keys().isdisjoint(self.named)
                is_head = new.keys().isdisjoint(known) and not any(map(NO_HEAD.search, new))
                is_part = path in files or (is_new and (new.keys() <= known | {LM_HEAD} or is_head))
                twice |= parts.keys() & new.keys() if is_part else set()
                (parts if is_part else others).update(new)
        return parts, others | {name: parts.pop(name) for name in twice}


def unused(tensors: Tensors, known: Set[str]) -> Tensors:
    left = tensors.keys() - known
    return {name: tensors[name] for name in left if not name.endswith(_ROTARY_BUFFER)}


def told(tensors: Tensors, name: str = "") -> str:
    """Returns words that list a few tensors, first those whose names end with `name`."""
    few = sorted(tensors.values(), key=lambda x: (not x.name.endswith(name), x.name))[:_MOST_TOLD]
    words = ", ".join(f"'{x.name}' with shape {list(x.shape)} in {x.path.name}" for x in few)
    return f"{words} and {len(tensors) - len(few):,} more" if len(tensors) > len(few) else words


def find_tensors(directory: Path) -> CheckpointFiles:
    """Returns the tensors of `model.safetensors` or, without this file, those that the index lists.
    Raises UserError if both are missing, or if a listed file is missing or damaged."""
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


def _by_name(tensors: Tensors, beside: Iterable[str] = ()) -> Tensors:
    usual = usual_names({*tensors, *beside})  # an adapter's prefix is not the checkpoint's
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
