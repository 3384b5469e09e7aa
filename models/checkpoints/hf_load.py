"""Reads a Hugging Face checkpoint directory into sharded parameters, one parameter at a time.

Every error in a checkpoint is found from config.json and the file headers, before any tensor is
read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from pat_jax.common.errors import UserError
from pat_jax.models.checkpoints.hf_config import CONFIG_FILE, read_config
from pat_jax.models.checkpoints.hf_tensors import EMBEDDING, LM_HEAD, HFTensor, hf_tensors
from pat_jax.models.checkpoints.json_fields import read_json_object
from pat_jax.models.checkpoints.safetensors_file import DTYPES, StoredTensor, read_header
from pat_jax.models.config import Head, ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.models.weight_formats import QuantizedWeight, quantizer

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Bounds = tuple[tuple[int, int], ...]  # start and stop of a shard in each dimension

_STACKS = (".experts.gate_up_proj", ".experts.down_proj")
_ROTARY_BUFFER = "rotary_emb.inv_freq"  # computed from the configuration; old versions stored it


def check_checkpoint(directory: str | Path, head: Head | None = None) -> ModelConfig:
    """Returns the checkpoint's configuration after checking every file and tensor against it.

    Reads config.json and file headers only, and compiles nothing.

    Args:
      head: the head that the model is to have, see `read_config`.

    Raises:
      UserError: the configuration, a file or a tensor is missing or wrong.
    """
    config = read_config(directory, head)
    _locate(Path(directory), Policy.from_config(config))
    return config


def load_params(
    directory: str | Path, policy: Policy, shardings: Params | None, dtype: jnp.dtype
) -> Params:
    """Returns the checkpoint's parameters in `dtype`, each read straight into its shards.

    Host memory peaks at about one parameter; of a layer's experts, only those that this process
    holds are read. Padding of the vocabulary and of query heads is zero, and so is a scalar head
    if the checkpoint has one over the vocabulary. Weights that `policy` keeps quantized are read in
    float32 and quantized on the devices.

    Args:
      shardings: the tree of the parameters with a `jax.sharding.Sharding` for each array; None puts
        everything on the default device.
    """
    unquantized = policy.with_weights("auto")
    located = _locate(Path(directory), unquantized)

    def read(
        tensor: HFTensor, shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding | None
    ) -> jax.Array:
        parts = [located[name] for name in tensor.names if name in located]  # none of a new head
        reader = _ShardReader(tensor, parts, shape, np.dtype(dtype), {})
        if sharding is None:
            array = jax.device_put(reader.read(None))
        else:
            array = jax.make_array_from_callback(shape, sharding, reader.read, dtype=dtype)
        return jax.block_until_ready(array)  # else the host would read ahead of the transfers

    def load(
        tensor: HFTensor,
        like: jax.ShapeDtypeStruct | QuantizedWeight,
        sharding: Any = None,  # of one array, or of both of a quantized weight
    ) -> jax.Array | QuantizedWeight:
        if not isinstance(like, QuantizedWeight):
            return read(tensor, like.shape, dtype, sharding)
        weight = read(tensor, like.shape, jnp.float32, sharding and sharding.values)
        return jax.block_until_ready(quantizer(like, sharding)(weight))

    trees = (hf_tensors(unquantized), policy.abstract_params)
    return jax.tree.map(load, *trees, *(() if shardings is None else (shardings,)))


@dataclass(frozen=True)
class _ShardReader:
    """Copies shards of one parameter from its mapped tensors; equal shards share a copy."""

    tensor: HFTensor
    parts: Sequence[StoredTensor]
    shape: tuple[int, ...]  # with padding
    dtype: np.dtype
    shards: dict[Bounds, np.ndarray]

    def read(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """Returns the shard at `index`, or the whole parameter for None."""
        index = (slice(None),) * len(self.shape) if index is None else index
        bounds = tuple(
            part.indices(length)[:2] for part, length in zip(index, self.shape, strict=True)
        )
        if bounds not in self.shards:
            self.shards[bounds] = self._copy(bounds)
        return self.shards[bounds]

    def _copy(self, bounds: Bounds) -> np.ndarray:
        # Always a copy: on CPU the device array may keep this buffer, and the file must not be it.
        shard = np.zeros([stop - start for start, stop in bounds], self.dtype)
        if not self.tensor.is_stack:
            for part in self.parts:  # one, or none of a head that begins at zero
                self._fill(shard, part, bounds)
            return shard
        for of_expert, part in zip(shard, self.parts[slice(*bounds[0])], strict=True):
            self._fill(of_expert, part, bounds[1:])
        return shard

    def _fill(self, place: np.ndarray, part: StoredTensor, bounds: Bounds) -> None:
        block = self.tensor.to_native(part.view())[tuple(slice(*each) for each in bounds)]
        place[tuple(slice(length) for length in block.shape)] = block  # behind it is padding


def _locate(directory: Path, policy: Policy) -> Mapping[str, StoredTensor]:
    """Returns where each tensor of the model is stored; UserError for the first error."""
    stored = _stored_tensors(directory)
    if policy.config.tie_embeddings and EMBEDDING not in stored and LM_HEAD in stored:
        stored[EMBEDDING] = stored.pop(LM_HEAD)  # one tensor, under either name
    is_scalar = policy.config.head == "scalar"
    if is_scalar:
        stored.pop(LM_HEAD, None)
    begins_anew = is_scalar and read_config(directory).head == "vocab"
    _refuse_stacks(stored)
    wanted: set[str] = set()
    for tensor in jax.tree.leaves(hf_tensors(policy)):
        if begins_anew and tensor.is_scalar_head:
            continue
        for name in tensor.names:
            _check_tensor(directory, stored, name, tensor.stored_shape)
            wanted.add(name)
    if policy.config.tie_embeddings and LM_HEAD in stored:
        _check_tied(stored.pop(LM_HEAD), stored[EMBEDDING])
    unexpected = sorted(
        name for name in stored.keys() - wanted if not name.endswith(_ROTARY_BUFFER)
    )
    if unexpected:
        experts = policy.config.experts
        and_experts = f" of {experts.num_experts} experts" if experts else ""
        raise UserError(
            f"{stored[unexpected[0]].path}: tensor '{unexpected[0]}' is one of {len(unexpected)} that "
            f"{policy.config.architecture} with {policy.config.num_layers} layers{and_experts} does not have, "
            f"expected only the model's own; check that {CONFIG_FILE} belongs to this checkpoint."
        )
    return stored


def _refuse_stacks(stored: Mapping[str, StoredTensor]) -> None:
    """Refuses stacks of experts, which transformers 5 stores only if it is told to."""
    for name, tensor in stored.items():
        if name.endswith(_STACKS):
            raise UserError(
                f"{tensor.path}: tensor '{name}' has all experts of a layer, expected a tensor of each; save the "
                "checkpoint with transformers' save_pretrained and save_original_format=True."
            )


def _check_tensor(
    directory: Path, stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...]
) -> None:
    if name not in stored:
        hint = " (tie_word_embeddings is false)" if name == LM_HEAD else ""
        raise UserError(
            f"{directory}: tensor '{name}' is in none of the safetensors files, expected it with shape "
            f"{list(shape)} by {CONFIG_FILE}{hint}; check that the checkpoint is complete."
        )
    found = stored[name]
    if found.shape != shape:
        raise UserError(
            f"{found.path}: tensor '{name}' has shape {list(found.shape)}, expected "
            f"{list(shape)} by {CONFIG_FILE}; check that the two belong together."
        )
    if found.dtype_name not in DTYPES:
        raise UserError(
            f"{found.path}: tensor '{name}' has type {found.dtype_name}, expected one of "
            f"{', '.join(DTYPES)}; choose a checkpoint whose weights are such numbers, not a quantized one."
        )


def _check_tied(head: StoredTensor, embedding: StoredTensor) -> None:
    """Refuses a tied head that differs: some checkpoints store it again, equal to the embedding."""
    is_alike = (head.shape, head.dtype_name) == (embedding.shape, embedding.dtype_name)
    if not is_alike or not np.array_equal(
        head.view().view(np.uint16), embedding.view().view(np.uint16)
    ):
        raise UserError(
            f"{head.path}: tensor '{LM_HEAD}' differs from '{EMBEDDING}', expected the same numbers because "
            f"tie_word_embeddings is true in {CONFIG_FILE}; set it to false to keep both."
        )


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of the directory by name, from one file or from those of the index."""
    if (directory / WEIGHTS_FILE).is_file():
        return read_header(directory / WEIGHTS_FILE)
    index_path = directory / INDEX_FILE
    if not index_path.is_file():
        raise UserError(
            f"{directory}: there is neither {WEIGHTS_FILE} nor {INDEX_FILE}, expected one of them; "
            f"convert other formats with transformers' save_pretrained."
        )
    weight_map = _weight_map(index_path)
    headers = {name: _shard_header(index_path, name) for name in sorted(set(weight_map.values()))}
    for tensor, file_name in weight_map.items():
        if tensor not in headers[file_name]:
            raise UserError(
                f"{directory / file_name}: tensor '{tensor}' is missing, expected here by {INDEX_FILE}; "
                f"download the file again."
            )
    return {tensor: headers[file_name][tensor] for tensor, file_name in weight_map.items()}


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
