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
from pat_jax.models.checkpoints.hf_families import OF_SEQUENCES, OF_TOKENS
from pat_jax.models.checkpoints.hf_files import NO_HEAD, CheckpointFiles, find_tensors, told, unused
from pat_jax.models.checkpoints.safetensors_file import DTYPES, StoredTensor
from pat_jax.models.config import Head, ModelConfig
from pat_jax.models.hf_tensors import (
    EMBEDDING,
    LM_HEAD,
    SCORE,
    SCORE_BIAS,
    HFTensor,
    hf_tensors,
)
from pat_jax.models.policy import Params, Policy
from pat_jax.models.weight_formats import QuantizedWeight, quantizer

Bounds = tuple[tuple[int, int], ...]  # start and stop of a shard in each dimension

_STACKS = (".experts.gate_up_proj", ".experts.down_proj")
_COMPLETE = "check that the checkpoint is complete"


def check_checkpoint(directory: str | Path, head: Head | None = None) -> ModelConfig:
    """Returns the checkpoint's configuration after checking every file and tensor against it.
    Raises UserError if the configuration, a file or a tensor is missing or wrong.

    Reads config.json and file headers only, and compiles nothing.

    Args:
      head: the head that the model is to have, see `read_config`.
    """
    config = read_config(directory, head)
    _locate(Path(directory), Policy.from_config(config))
    return config


def load_params(
    directory: str | Path, policy: Policy, shardings: Params | None, dtype: jnp.dtype
) -> Params:
    """Returns the checkpoint's parameters in `dtype`, each read straight into its shards.

    The host holds about one parameter at a time. A process reads only the experts that it holds.
    Padding of the vocabulary and of query heads is zero. A scalar head is zero if the checkpoint
    has a head over the vocabulary. Weights that `policy` keeps quantized are read in float32 and
    quantized on the devices.

    Args:
      shardings: the tree of the parameters with a `jax.sharding.Sharding` for each array, or None
        to put all arrays on the default device.
    """
    unquantized = policy.with_weights("auto")
    located = _locate(Path(directory), unquantized)

    def read(
        tensor: HFTensor, shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding | None
    ) -> jax.Array:
        parts = [located[name] for name in tensor.names if name in located]  # empty for a new head
        reader = _ShardReader(tensor, parts, shape, np.dtype(dtype), {})
        if sharding is None:
            array = jax.device_put(reader.read(None))
        else:
            array = jax.make_array_from_callback(shape, sharding, reader.read, dtype=dtype)
        return jax.block_until_ready(array)  # else the host would read ahead of the transfers

    def load(
        tensor: HFTensor,
        like: jax.ShapeDtypeStruct | QuantizedWeight,
        sharding: Any = None,  # of one array, or of both arrays of a quantized weight
    ) -> jax.Array | QuantizedWeight:
        if not isinstance(like, QuantizedWeight):
            return read(tensor, like.shape, dtype, sharding)
        weight = read(tensor, like.shape, jnp.float32, sharding and sharding.values)
        return jax.block_until_ready(quantizer(like, sharding)(weight))

    trees = (hf_tensors(unquantized), policy.abstract_params)
    return jax.tree.map(load, *trees, *(() if shardings is None else (shardings,)))


@dataclass(frozen=True)
class _ShardReader:
    """Copies shards of one parameter from memory-mapped tensors; equal shards share a copy."""

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
        native = part.view().reshape(self.tensor.part_shape)
        block = native[tuple(slice(*each) for each in bounds)]
        with np.errstate(over="ignore"):  # the check tells
            place[tuple(slice(length) for length in block.shape)] = block  # behind it is padding
        part.check_finite(place)


def _locate(directory: Path, policy: Policy) -> Mapping[str, StoredTensor]:
    """Returns where each tensor of the model is stored. Raises UserError if one is missing or
    wrong."""
    files = find_tensors(directory)
    stored = files.named
    config = policy.config
    if config.tie_embeddings and EMBEDDING not in stored and LM_HEAD in stored:
        stored[EMBEDDING] = stored.pop(LM_HEAD)  # one tensor, under either name
    is_scalar = config.head == "scalar"
    begins_anew = is_scalar and read_config(directory).head == "vocab"
    _refuse_stacks(stored)
    shapes = {
        name: tensor.stored_shape
        for tensor in jax.tree.leaves(hf_tensors(policy))
        if not (begins_anew and tensor.is_scalar_head)
        for name in tensor.names
    }
    if begins_anew or not shapes.keys() <= stored.keys():
        _add_spare(files, shapes, config)
    for name, shape in shapes.items():
        _check_tensor(stored[name], name, shape)
    if config.tie_embeddings and LM_HEAD in stored and not is_scalar:
        _check_tied(stored[LM_HEAD], stored[EMBEDDING])
    may_be_there = {LM_HEAD} if is_scalar or config.tie_embeddings else set[str]()
    unexpected = sorted(unused(stored, shapes.keys() | may_be_there))
    if unexpected:
        experts = config.experts
        and_experts = f" of {experts.num_experts} experts" if experts else ""
        raise UserError(
            f"{stored[unexpected[0]].path}: tensor '{unexpected[0]}' is one of {len(unexpected)} that "
            f"{config.architecture} with {config.num_layers} layers{and_experts} does not have, "
            f"expected only the model's own; check that {CONFIG_FILE} belongs to this checkpoint."
        )
    return stored


def _add_spare(
    files: CheckpointFiles, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> None:
    """Adds the model's tensors that the index does not list to `files`. A scalar head may have
    another name, if the files have no other tensor that the model lacks."""
    stored = files.named
    parts, others = files.spare(shapes.keys())
    stored |= {name: x for name, x in parts.items() if name in shapes}
    left = unused(stored | parts, shapes.keys())
    missing = shapes.keys() - stored.keys()
    of_head = {("weight", (1, config.embed_dim)): SCORE, ("bias", (1,)): SCORE_BIAS}
    kinds = {name: of_head.get((name.rpartition(".")[2], x.shape)) for name, x in left.items()}
    heads = {head: name for name, head in kinds.items() if head and not NO_HEAD.search(name)}
    if missing and heads.keys() == missing and left.keys() - heads.values() <= {LM_HEAD}:
        stored |= {head: stored.pop(name, left[name]) for head, name in heads.items()}
    elif SCORE in heads and SCORE not in shapes and config.head == "scalar":
        raise UserError(
            f"{files.directory}: there is a scalar head, {told({SCORE: left[heads[SCORE]]})}, which the class in "
            f"{CONFIG_FILE} has not, expected …{OF_SEQUENCES.suffix} or, with a bias, …{OF_TOKENS.suffix}; "
            "correct it, or take the head away to begin with zeros."
        )
    if lacking := [name for name in shapes if name not in stored]:
        name = lacking[0]
        left = others | left
        hint = " (tie_word_embeddings is false)" if name == LM_HEAD else ""
        advice = f"name it so if it is one left over, {told(left, name)}" if left else _COMPLETE
        raise UserError(
            f"{files.directory / files.stale.get(name, '')}: tensor '{name}' is in none of the safetensors "
            f"files, expected it with shape {list(shapes[name])} by {CONFIG_FILE}{hint}; {advice}."
        )


def _refuse_stacks(stored: Mapping[str, StoredTensor]) -> None:
    """Raises UserError for stacks of experts, which transformers 5 stores only on request."""
    for name, tensor in stored.items():
        if name.endswith(_STACKS):
            raise UserError(
                f"{tensor.path}: tensor '{name}' has all experts of a layer, expected a tensor of each; save the "
                "checkpoint with transformers' save_pretrained and save_original_format=True."
            )


def _check_tensor(found: StoredTensor, name: str, shape: tuple[int, ...]) -> None:
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
    """Raises UserError if a stored output head differs from the embedding to which it is tied."""
    is_alike = (head.shape, head.dtype_name) == (embedding.shape, embedding.dtype_name)
    if not is_alike or not np.array_equal(
        head.view().view(np.uint16), embedding.view().view(np.uint16)
    ):
        raise UserError(
            f"{head.path}: tensor '{LM_HEAD}' differs from '{EMBEDDING}', expected the same numbers because "
            f"tie_word_embeddings is true in {CONFIG_FILE}; set it to false to keep both."
        )
