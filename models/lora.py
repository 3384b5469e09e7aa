"""Low-rank adapters of a policy's linear layers (LoRA, arXiv 2106.09685).

Knows which parameters have an adapter, and how base and adapters make a policy. A scalar head has
none: it is small, and its own weights are trained. Does not know how adapters are trained or stored
(`peft_adapter.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pat_jax.common.pytree import pytree_dataclass
from pat_jax.models.adapted_modules import Linear, is_stack, linear_weights, targeted
from pat_jax.models.adapted_weight import AdaptedWeight, adapter_axes, is_adapted
from pat_jax.models.parameters import Initializer, padded, zeros
from pat_jax.models.policy import Params, Policy, initialize

_STREAM = 0x10A  # stream of random keys, distinct from those of the base's parameters


@pytree_dataclass
class Adapter:
    """The low-rank factors trained for a weight [*out, *in], or for a stack [experts, out, in].

    The leaves are float32 arrays, or shapes, axes or shardings in their place."""

    a: Any  # [rank, *in], or [experts, rank, in]
    # [*out, rank], or [experts, out, rank]. If gate and up share a, a list with one b for each.
    b: Any


# The `Adapter` of each module, by the module's name, such as model.layers.0.mlp.up_proj; and the
# arrays of a scalar head, as score and score.bias.
Adapters = dict[str, Any]


@dataclass(frozen=True)
class Lora:
    """The constants of a policy's adapters: which modules have one, their rank and alpha."""

    policy: Policy
    rank: int
    alpha: float
    modules: tuple[str, ...]  # modules that have an adapter
    # Whether the adapter that gate and up share has twice the rank at the same scale. PEFT makes it
    # so if gate and up were two targets.
    doubles_gate_up: bool = False

    @classmethod
    def of(cls, policy: Policy, *, rank: int, alpha: float, targets: Sequence[str]) -> "Lora":
        """Returns adapters for the modules that `targets` choose. Raises UserError if a target
        matches no linear layer.

        Args:
          targets: suffixes of module names, as in PEFT: `q_proj`, `mlp.up_proj` or
            `layers.0.self_attn.o_proj`; for experts `experts.gate_up_proj`, `experts.down_proj` and
            `gate.weight`. `all-linear` chooses every linear layer; in a model with experts, only
            the linear layers of attention.
        """
        return cls(policy, rank, alpha, targeted(policy, targets))

    @property
    def scale(self) -> float:
        """The factor of the product b · a: alpha / rank."""
        return self.alpha / self.rank

    @property
    def kinds(self) -> list[str]:
        """The last parts of the modules' names, such as `q_proj`, each once."""
        return list(dict.fromkeys(name.rpartition(".")[2] for name in self.modules))

    @property
    def num_weights(self) -> int:
        """Number of weights of all adapters and a scalar head, without their padding."""
        return sum(map(_size, self.unpadded.values()))

    @property
    def active_weights(self) -> int:
        """Number of adapter weights that a token uses; of experts, only the token's count."""
        stacks = sum(_size(x) for name, x in self.unpadded.items() if is_stack(name))
        if not stacks:
            return self.num_weights
        experts = self.policy.config.experts
        assert experts is not None
        others = experts.num_experts - experts.num_experts_per_tok
        return self.num_weights - stacks * others // experts.num_experts

    @property
    def abstract_params(self) -> Adapters:
        """The shapes of the adapters, float32."""

        def shaped(linear: Linear, weight: jax.ShapeDtypeStruct) -> Adapter:
            out, into = weight.shape[: -linear.num_in], weight.shape[-linear.num_in :]
            has_two = self.doubles_gate_up and linear.part is not None
            rank = 2 * self.rank if has_two else self.rank
            a = jax.ShapeDtypeStruct((*out[: linear.is_stack], rank, *into), jnp.float32)
            return Adapter(a, jax.ShapeDtypeStruct((*out, rank), jnp.float32))

        return self._each(self.policy.abstract_params, shaped)

    @property
    def unpadded(self) -> Adapters:
        """The shapes of the adapters without padding."""
        return jax.tree.map(
            lambda like, axes: self.policy.config.unpadded(like.shape, axes),
            self.abstract_params,
            self.param_axes,
        )

    @property
    def param_axes(self) -> Adapters:
        """The axis names of the adapters."""

        def named(linear: Linear, axes: tuple[str | None, ...]) -> Adapter:
            a, b = adapter_axes(axes, linear.num_in, is_stack=linear.is_stack)
            return Adapter(a, b)

        return self._each(self.policy.param_axes, named)

    def init(
        self, seed: int, shardings: Adapters | None = None, base: Params | None = None
    ) -> Adapters:
        """Returns new adapters, which do not change the policy's outputs.

        a is uniform in ±1/√fan_in, as in PEFT (Kaiming with slope √5). b and padding are zero.

        Args:
          base: the policy's parameters, whose scalar head is copied, or None for a head of zeros.
        """
        key = jax.random.fold_in(jax.random.key(seed), _STREAM)
        made: Adapters = {}
        unpadded = self.unpadded
        head = self._head(base) if base is not None else {}
        for i, (name, like) in enumerate(self.abstract_params.items()):
            placed = shardings[name] if shardings is not None else None
            if name in head:
                made[name] = jnp.array(head[name], jnp.float32, copy=True)  # both may be donated
                continue
            if not isinstance(like, Adapter):
                made[name] = initialize(zeros, like, placed, jnp.float32)(key)
                continue
            num_stack = int(is_stack(name))
            uniform = padded(_uniform(like.a.ndim - 1 - num_stack, num_stack), unpadded[name].a)
            made[name] = _new(like, uniform, placed or Adapter(None, None), key, i)
        return made

    def attach(self, base: Params, adapters: Adapters) -> Params:
        """Returns the policy's parameters, an `AdaptedWeight` in place of each adapted weight."""

        def scaled(x: Array | AdaptedWeight) -> Array | AdaptedWeight:
            if not isinstance(x, AdaptedWeight):
                return x
            # A copy of a: gate and up share it, and each of their buffers may be deleted alone.
            return replace(x, a=jnp.copy(x.a), b=self.scale * x.b)

        return jax.tree.map(scaled, self.beside_each(base, adapters), is_leaf=is_adapted)

    def beside_each(self, base: Any, adapters: Any) -> Any:
        """Returns the result of `attach` without the factor `scale` in b. Leaves may also be shapes
        or shardings."""

        def paired(linear: Linear, weight: Any) -> Any:
            adapter = adapters.get(linear.module)
            if not isinstance(adapter, Adapter):
                return weight if adapter is None else adapter
            b = adapter.b if linear.part is None else adapter.b[linear.part]
            return AdaptedWeight(weight, adapter.a, b)

        return jax.tree.map(paired, linear_weights(self.policy), base)

    @property
    def factors(self) -> Any:
        """The factors, one for each array, by which `attach` multiplies those of `beside_each`."""
        ones = jax.tree.map(lambda _: 1.0, self.policy.abstract_params)
        factors = self._each(ones, lambda *_: Adapter(1.0, self.scale))
        return self.beside_each(ones, factors)

    def beside(self, kept: Policy) -> Policy:
        """Returns `kept`, this policy in some weight format, with the adapters' shapes added."""
        shapes = jax.eval_shape(self.attach, kept.abstract_params, self.abstract_params)
        return replace(kept, abstract_params=shapes)

    def merge(self, base: Params, adapters: Adapters) -> Params:
        """Returns the policy's parameters with the adapters merged: W + scale · b · a, float32."""
        return jax.tree.map(
            lambda x: x.merged() if isinstance(x, AdaptedWeight) else x.astype(jnp.float32),
            self.attach(base, adapters),
            is_leaf=is_adapted,
        )

    def _each(self, tree: Params, describe: Callable[[Linear, Any], Adapter]) -> Adapters:
        """Returns each module's adapter, made by `describe` from the leaf of `tree` for its weight,
        and the unchanged leaves of a scalar head."""
        chosen = set(self.modules)
        made = Adapters()
        for linear, leaf in self._described(tree):
            if linear.module not in chosen:
                continue
            adapter = describe(linear, leaf)
            if linear.part is not None:
                parts = made[linear.module].b if linear.part else []
                adapter = Adapter(adapter.a, [*parts, adapter.b])
            made[linear.module] = adapter
        return made | self._head(tree)

    def _head(self, tree: Params) -> Adapters:
        """Returns the leaves of a scalar head in a tree of the policy's parameters."""
        pairs = self._described(tree)
        return {linear.module: leaf for linear, leaf in pairs if linear.is_scalar_head}

    def _described(self, tree: Params) -> Iterator[tuple[Linear, Any]]:
        leaves = jax.tree.leaves(tree, is_leaf=_is_shape)
        return zip(jax.tree.leaves(linear_weights(self.policy)), leaves, strict=True)


def _new(like: Adapter, init: Initializer, placed: Adapter, key: Array, number: int) -> Adapter:
    """Returns an adapter whose a is initialized by `init`, and whose b is zero."""
    likes, tree = jax.tree.flatten(like.b)
    places = jax.tree.leaves(placed.b) or [None] * len(likes)
    b = (
        initialize(zeros, each, place, jnp.float32)(key)
        for each, place in zip(likes, places, strict=True)
    )
    a = initialize(init, like.a, placed.a, jnp.float32)(jax.random.fold_in(key, number))
    return Adapter(a, jax.tree.unflatten(tree, b))


def _is_shape(node: object) -> bool:
    return isinstance(node, tuple)


def _size(adapter: Adapter) -> int:
    """Returns the number of weights of an adapter whose leaves are shapes."""
    return sum(map(math.prod, jax.tree.leaves(adapter, is_leaf=_is_shape)))


@lru_cache
def _uniform(num_in: int, num_stack: int) -> Initializer:
    """Returns an initializer that draws uniformly from ±1/√fan_in. It is cached, so that each shape
    compiles once.

    Args:
      num_in: number of trailing dimensions that are inputs.
      num_stack: number of leading dimensions for experts.
    """
    into = tuple(range(-num_in, 0))
    stack = tuple(range(num_stack))
    return jax.nn.initializers.variance_scaling(
        1 / 3, "fan_in", "uniform", in_axis=into, out_axis=num_stack, batch_axis=stack
    )
