"""Low-rank adapters of a policy's linear layers (LoRA, arXiv 2106.09685).

Knows which parameters have an adapter and what a policy with them is. Does not know how adapters
are trained or stored (`peft_adapter.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pat_jax.common.errors import UserError
from pat_jax.common.pytree import pytree_dataclass
from pat_jax.models.adapted_weight import AdaptedWeight, adapter_axes, is_adapted
from pat_jax.models.checkpoints.hf_tensors import HFTensor, hf_tensors
from pat_jax.models.parameters import Initializer, padded, zeros
from pat_jax.models.policy import Params, Policy, initialize

ALL_LINEAR = "all-linear"  # as PEFT calls them: those of the layers, not the output head
# Parts of names in a model with experts, of what has no adapter.
_PLACES = {"mlp", "block_sparse_moe", "experts"}
_IN_THEM = {"gate", "router", "gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
_IN_THEM |= {"fc1_latent_proj", "fc2_latent_proj"}
_STREAM = 0x10A  # of random keys: none is the key of a parameter of the base


@pytree_dataclass
class Adapter:
    """What is trained in place of one weight [*out, *in]: float32 arrays, or in their place shapes,
    axes or shardings."""

    a: Any  # [rank, *in]
    b: Any  # [*out, rank]


Adapters = dict[str, Adapter]  # by the module of Hugging Face, as model.layers.0.mlp.up_proj


@dataclass(frozen=True)
class Lora:
    """The static half of a policy's adapters, as `Policy` is of its parameters."""

    policy: Policy
    rank: int
    alpha: float
    modules: tuple[str, ...]  # that have an adapter

    @classmethod
    def of(cls, policy: Policy, *, rank: int, alpha: float, targets: Sequence[str]) -> "Lora":
        """
        Args:
          targets: ends of modules' names, as PEFT takes them: `q_proj`, `mlp.up_proj`,
            `layers.0.self_attn.o_proj`; or `all-linear`, of a model with experts its attention.

        Raises:
          UserError: a target matches no linear layer.
        """
        linear = list(linear_layers(policy))
        chosen: set[str] = set()
        for target in targets:
            found = {x for x in linear if target == ALL_LINEAR or f".{x}".endswith(f".{target}")}
            if not found:
                raise _unmatched(target, linear, policy)
            chosen |= found
        return cls(policy, rank, alpha, tuple(name for name in linear if name in chosen))

    @property
    def scale(self) -> float:
        """The factor of the product b · a."""
        return self.alpha / self.rank

    @property
    def kinds(self) -> list[str]:
        """Names of the modules without their layers, each once."""
        return list(dict.fromkeys(name.rpartition(".")[2] for name in self.modules))

    @property
    def num_weights(self) -> int:
        """Number of weights of all adapters, without their padding."""
        return sum(map(math.prod, jax.tree.leaves(self.unpadded, is_leaf=_is_shape)))

    @property
    def abstract_params(self) -> Adapters:
        """Their shapes, float32."""

        def shaped(weight: jax.ShapeDtypeStruct, num_in: int) -> Adapter:
            out, into = weight.shape[:-num_in], weight.shape[-num_in:]
            shapes = (self.rank, *into), (*out, self.rank)
            return Adapter(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))

        return self._each(self.policy.abstract_params, shaped)

    @property
    def unpadded(self) -> Adapters:
        """Their shapes without what pads the weights."""
        config, axes = self.policy.config, self.param_axes()
        return {
            name: Adapter(
                config.unpadded(like.a.shape, axes[name].a),
                config.unpadded(like.b.shape, axes[name].b),
            )
            for name, like in self.abstract_params.items()
        }

    def param_axes(self) -> Adapters:
        """Axis names."""
        return self._each(
            self.policy.param_axes(), lambda axes, num_in: Adapter(*adapter_axes(axes, num_in))
        )

    def init(self, seed: int, shardings: Adapters | None = None) -> Adapters:
        """a uniform in ±1/√fan_in, as PEFT has it (Kaiming's with a slope of √5), and b of zeros:
        at first the policy is its base. What pads a weight has zeros in both."""
        key = jax.random.fold_in(jax.random.key(seed), _STREAM)
        made: Adapters = {}
        unpadded = self.unpadded
        for i, (name, like) in enumerate(self.abstract_params.items()):
            placed = shardings[name] if shardings is not None else Adapter(None, None)
            uniform = padded(_uniform(like.a.ndim - 1), unpadded[name].a)
            made[name] = Adapter(
                initialize(uniform, like.a, placed.a, jnp.float32)(jax.random.fold_in(key, i)),
                initialize(zeros, like.b, placed.b, jnp.float32)(key),
            )
        return made

    def attach(self, base: Params, adapters: Adapters) -> Params:
        """The policy with its adapters beside its weights."""

        def scaled(x: Array | AdaptedWeight) -> Array | AdaptedWeight:
            return replace(x, b=self.scale * x.b) if isinstance(x, AdaptedWeight) else x

        return jax.tree.map(scaled, self.beside_each(base, adapters), is_leaf=is_adapted)

    def beside_each(self, base: Any, adapters: Any) -> Any:
        """The same of arrays, shapes or shardings; b without the scale."""

        def paired(tensor: HFTensor, weight: Any) -> Any:
            adapter = adapters.get(tensor.module)
            return weight if adapter is None else AdaptedWeight(weight, adapter.a, adapter.b)

        return jax.tree.map(paired, hf_tensors(self.policy), base)

    @property
    def factors(self) -> Any:
        """What `attach` multiplies each array of `beside_each` by."""
        ones = jax.tree.map(lambda _: 1.0, self.policy.abstract_params)
        factors = {name: Adapter(1.0, self.scale) for name in self.modules}
        return self.beside_each(ones, factors)

    def beside(self, kept: Policy) -> Policy:
        """`kept`, which is this policy in whatever format, as one that has adapters beside its
        weights."""
        shapes = jax.eval_shape(self.attach, kept.abstract_params, self.abstract_params)
        return replace(kept, abstract_params=shapes)

    def merge(self, base: Params, adapters: Adapters) -> Params:
        """The policy as one without adapters, float32: W + scale · b · a."""
        return jax.tree.map(
            lambda x: x.merged() if isinstance(x, AdaptedWeight) else x.astype(jnp.float32),
            self.attach(base, adapters),
            is_leaf=is_adapted,
        )

    def _each(self, tree: Params, describe: Callable[[Any, int], Adapter]) -> Adapters:
        """Of each module that has an adapter, from its leaf of `tree` and the dimensions summed over."""
        linear = linear_layers(self.policy)
        leaves = jax.tree.leaves(tree, is_leaf=_is_shape)
        tensors = jax.tree.leaves(hf_tensors(self.policy))
        of_module = {tensor.module: x for tensor, x in zip(tensors, leaves, strict=True)}
        return {name: describe(of_module[name], linear[name]) for name in self.modules}


def _is_shape(node: object) -> bool:
    return isinstance(node, tuple)


@lru_cache
def _uniform(num_in: int) -> Initializer:
    """Equal arguments give the same object: what it makes is compiled once for each shape."""
    into = tuple(range(-num_in, 0))
    return jax.nn.initializers.variance_scaling(
        1 / 3, "fan_in", "uniform", in_axis=into, out_axis=0
    )


def linear_layers(policy: Policy) -> dict[str, int]:
    """Modules that may have an adapter, and how many trailing dimensions of their weights they sum
    over: those that multiply by a weight, of a model with experts its attention alone.

    PEFT 0.21 takes whatever is called as an MLP's layers are as the experts of such a model.
    """
    tensors = jax.tree.leaves(hf_tensors(policy))
    variables = jax.tree.leaves(
        policy.abstract_params, is_leaf=lambda x: hasattr(x, "get_metadata")
    )
    pairs = zip(tensors, variables, strict=True)
    summed = {tensor.module: variable.get_metadata()["contracted"] for tensor, variable in pairs}
    return {
        module: num_in
        for module, num_in in summed.items()
        if num_in and not is_beside_attention(policy, module)
    }


def is_beside_attention(policy: Policy, module: str) -> bool:
    """Whether a name, or the end of one, is of experts, of a router or of an MLP in a model with
    experts, as a checkpoint or transformers 5 calls them."""
    parts = set(module.split("."))
    return policy.config.experts is not None and bool(parts & (_PLACES | _IN_THEM))


def _unmatched(target: str, linear: Sequence[str], policy: Policy) -> UserError:
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    if is_beside_attention(policy, target):
        return UserError(
            f"option --lora.targets is {target!r}: in a model with experts no MLP, expert or router has an "
            f"adapter yet, expected the ends of names such as {linear[0]!r}, that is {', '.join(kinds)}, or "
            f"{ALL_LINEAR} for all of these."
        )
    last = target.rpartition(".")[2]
    nearest = get_close_matches(last.lower(), [*kinds, ALL_LINEAR], n=1, cutoff=0.0)[0]
    return UserError(
        f"option --lora.targets is {target!r}: no linear layer of the model is called that, expected "
        f"the ends of names such as {linear[0]!r}, that is {', '.join(kinds)}, or {ALL_LINEAR}; the "
        f"nearest is {nearest!r}."
    )
