"""Names and shapes of each parameter in Hugging Face checkpoints, for reading and writing.

Checkpoints ("there" below) and pat_jax ("here") store a linear layer as [out, in]. There all heads
are one dimension; here they are [kv_heads, queries_per_kv, head_dim]. Head number h is kv_head *
queries_per_kv + query, so splitting or merging the dimensions never moves a value. Padding is at
the end of a dimension. A layer's experts are one parameter here, and one tensor per expert there.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import jax
import numpy as np

from pat_jax.models.policy import Params, Policy


class _Form(Enum):
    INPUT = auto()  # reads the residual stream: [out, embed] there, [*out, embed] here
    OUTPUT = auto()  # writes to the residual stream: [embed, in] there, [embed, *in] here
    VECTOR = auto()  # norms and biases: one dimension there
    EXPERTS = auto()  # [out, in] of each expert there, [experts, out, in] here


EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
SCALAR_HEAD = SCORE, SCORE_BIAS = "score.weight", "score.bias"

_LAYER = re.compile(r"(.*?)(?:model\.)?layers\.\d+\.")
_OF_BARE_MODEL = re.compile(r"^(?=(?:layers|embed_tokens|norm)\.)")

_MODEL_TENSORS: dict[str, tuple[str, _Form]] = {
    "embedding": (EMBEDDING, _Form.INPUT),
    "final_norm": ("model.norm.weight", _Form.VECTOR),
    "lm_head": (LM_HEAD, _Form.INPUT),
    "score": (SCORE, _Form.INPUT),
    "score_bias": (SCORE_BIAS, _Form.VECTOR),
}
_LAYER_TENSORS: dict[str, tuple[str, _Form]] = {
    "attention_norm": ("input_layernorm.weight", _Form.VECTOR),
    "attention.query": ("self_attn.q_proj.weight", _Form.INPUT),
    "attention.key": ("self_attn.k_proj.weight", _Form.INPUT),
    "attention.value": ("self_attn.v_proj.weight", _Form.INPUT),
    "attention.out": ("self_attn.o_proj.weight", _Form.OUTPUT),
    "attention.query_bias": ("self_attn.q_proj.bias", _Form.VECTOR),
    "attention.key_bias": ("self_attn.k_proj.bias", _Form.VECTOR),
    "attention.value_bias": ("self_attn.v_proj.bias", _Form.VECTOR),
    "attention.query_norm": ("self_attn.q_norm.weight", _Form.VECTOR),
    "attention.key_norm": ("self_attn.k_norm.weight", _Form.VECTOR),
    "mlp_norm": ("post_attention_layernorm.weight", _Form.VECTOR),
    "mlp.gate": ("mlp.gate_proj.weight", _Form.INPUT),
    "mlp.up": ("mlp.up_proj.weight", _Form.INPUT),
    "mlp.down": ("mlp.down_proj.weight", _Form.OUTPUT),
}
# The tensors of layers with experts, in place of the MLP's; {} stands for an expert's number.
_QWEN3_MOE_TENSORS = {
    "mlp.router": ("mlp.gate.weight", _Form.INPUT),
    "mlp.gate": ("mlp.experts.{}.gate_proj.weight", _Form.EXPERTS),
    "mlp.up": ("mlp.experts.{}.up_proj.weight", _Form.EXPERTS),
    "mlp.down": ("mlp.experts.{}.down_proj.weight", _Form.EXPERTS),
}
_EXPERTS_TENSORS: Mapping[str, dict[str, tuple[str, _Form]]] = {
    "qwen3_moe": _QWEN3_MOE_TENSORS,
    # The shared matrices have the names that Nemotron-H gives to its own.
    "bigmac": _QWEN3_MOE_TENSORS
    | {
        "mlp.descend": ("mlp.fc1_latent_proj.weight", _Form.INPUT),
        "mlp.ascend": ("mlp.fc2_latent_proj.weight", _Form.OUTPUT),
    },
    "mixtral": {
        "mlp.router": ("block_sparse_moe.gate.weight", _Form.INPUT),
        "mlp.gate": ("block_sparse_moe.experts.{}.w1.weight", _Form.EXPERTS),
        "mlp.up": ("block_sparse_moe.experts.{}.w3.weight", _Form.EXPERTS),
        "mlp.down": ("block_sparse_moe.experts.{}.w2.weight", _Form.EXPERTS),
    },
}


@dataclass(frozen=True)
class HFTensor:
    """One parameter: its name in a Hugging Face checkpoint, and its shape in pat_jax without
    padding."""

    name: str  # with {} in place of an expert's number
    native_shape: tuple[int, ...]
    form: _Form

    @property
    def module(self) -> str:
        """Name of the module whose weight the tensor is, or a bias's own name."""
        return self.name.removesuffix(".weight")

    @property
    def is_scalar_head(self) -> bool:
        return self.name in SCALAR_HEAD

    @property
    def is_stack(self) -> bool:
        """Whether checkpoints store the parameter as one tensor for each expert."""
        return self.form is _Form.EXPERTS

    @property
    def names(self) -> Iterator[str]:
        """Names of the parameter's tensors in a checkpoint: one, or one per expert in order."""
        if not self.is_stack:
            return iter((self.name,))
        return (self.name.format(expert) for expert in range(self.native_shape[0]))

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape in pat_jax of one stored tensor, without padding."""
        return self.native_shape[1:] if self.is_stack else self.native_shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one tensor in a checkpoint."""
        shape = self.native_shape
        match self.form:
            case _Form.INPUT:
                return (math.prod(shape[:-1]), shape[-1])
            case _Form.OUTPUT:
                return (shape[0], math.prod(shape[1:]))
            case _Form.VECTOR:
                return (math.prod(shape),)
            case _Form.EXPERTS:
                return self.part_shape

    def to_stored(self, native: np.ndarray) -> np.ndarray:
        """Reshapes one tensor of pat_jax, with or without padding, to its shape in a checkpoint."""
        unpadded = native[tuple(slice(length) for length in self.part_shape)]
        return unpadded.reshape(self.stored_shape)


def hf_tensors(policy: Policy) -> Params:
    """Returns the tree of the policy's parameters with an `HFTensor` in place of each array."""
    sparse = _LAYER_TENSORS | _EXPERTS_TENSORS.get(policy.config.architecture, {})
    of_layer = {False: _LAYER_TENSORS, True: sparse}

    def describe(
        path: jax.tree_util.KeyPath, axes: tuple[str | None, ...], array: jax.ShapeDtypeStruct
    ) -> HFTensor:
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if keys[0] == "layers":
            suffix, form = of_layer[policy.config.is_sparse(keys[1])][".".join(keys[2:])]
            name = f"model.layers.{keys[1]}.{suffix}"
        else:
            name, form = _MODEL_TENSORS[keys[0]]
        return HFTensor(name, policy.config.unpadded(array.shape, axes), form)

    return jax.tree_util.tree_map_with_path(
        describe,
        policy.param_axes,
        policy.abstract_params,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def usual_names(names: Iterable[str]) -> dict[str, str]:
    """Returns, for each tensor name, the name in transformers' models with a head. A prefix that
    all layers share, as of a PyTorch wrapper, is removed, and a missing `model.` added."""
    names = list(names)
    prefixes = {found[1] for name in names if (found := _LAYER.match(name))}
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    usual = {x: _OF_BARE_MODEL.sub("model.", x.removeprefix(prefix)) for x in names}
    return usual if len(set(usual.values())) == len(names) else {name: name for name in names}


def num_parameters(policy: Policy) -> int:
    """Returns the number of parameters, without padding of the vocabulary and the heads."""
    return sum(math.prod(tensor.native_shape) for tensor in jax.tree.leaves(hf_tensors(policy)))
