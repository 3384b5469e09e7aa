"""A transformer without its parameters, with their shapes and axis names."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pat_jax.models.adapted_weight import AdaptedWeight, adapter_axes
from pat_jax.models.config import ModelConfig
from pat_jax.models.parameters import Initializer, Keys
from pat_jax.models.transformer import Transformer
from pat_jax.models.weight_formats import (
    QuantizedWeight,
    WeightFormat,
    abstract_weight,
    is_quantized,
    stored,
)

# A pytree of arrays, one for each parameter; a quantized or adapted parameter has several.
Params = nnx.State


@dataclass(frozen=True)
class Policy:
    """A model without its parameters, which functions take as a separate pytree of arrays."""

    config: ModelConfig
    definition: nnx.GraphDef
    abstract_params: Params  # ShapeDtypeStructs, float32 except quantized weights

    @classmethod
    def from_config(cls, config: ModelConfig) -> "Policy":
        model = nnx.eval_shape(lambda: Transformer(config, keys=Keys(jax.random.key(0))))
        definition, abstract_params = nnx.split(model, nnx.Param)
        return cls(config, definition, abstract_params)

    def with_weights(self, weights: WeightFormat) -> "Policy":
        """Returns this policy with its parameters kept in the format `weights`."""

        def kept(variable: nnx.Variable) -> nnx.Variable:
            contracted = variable.get_metadata()["contracted"]
            return variable.replace(abstract_weight(variable.shape, contracted, weights))

        return replace(
            self, abstract_params=jax.tree.map(kept, self.abstract_params, is_leaf=_is_variable)
        )

    def bind(self, params: Params) -> Transformer:
        return nnx.merge(self.definition, params)

    def init(
        self, seed: int, shardings: Params | None = None, dtype: jnp.dtype = jnp.float32
    ) -> Params:
        """Returns random parameters, each computed on the devices that hold it.

        Parameters of equal shape share a small program: one for all takes minutes to compile.
        """
        variables, tree = jax.tree.flatten(self.abstract_params, is_leaf=_is_variable)
        placed = [None] * len(variables)
        if shardings is not None:
            placed = jax.tree.leaves(shardings, is_leaf=is_quantized)
        keys = [jax.random.fold_in(jax.random.key(seed), i) for i in range(len(variables))]
        return jax.tree.unflatten(
            tree,
            [
                variable.replace(
                    initialize(
                        variable.get_metadata()["init"], variable.get_value(), sharding, dtype
                    )(key)
                )
                for variable, sharding, key in zip(variables, placed, keys, strict=True)
            ],
        )

    @cached_property
    def param_axes(self) -> Params:
        """The tree of the parameters with a tuple of axis names in place of each array."""

        def named(variable: nnx.Variable) -> nnx.Variable:
            axes = variable.get_metadata()["axes"]
            value = variable.get_value()
            if isinstance(value, AdaptedWeight):
                a, b = adapter_axes(axes, value.contracted, is_stack=value.is_stack)
                return variable.replace(AdaptedWeight(_format_axes(value.weight, axes), a, b))
            return variable.replace(_format_axes(value, axes))

        return jax.tree.map(named, self.abstract_params, is_leaf=_is_variable)

    def abstract(self, dtype: jnp.dtype) -> Params:
        """Returns the shapes of the parameters in `dtype`; quantized weights keep their format."""

        def kept(
            x: jax.ShapeDtypeStruct | QuantizedWeight,
        ) -> jax.ShapeDtypeStruct | QuantizedWeight:
            return x if isinstance(x, QuantizedWeight) else jax.ShapeDtypeStruct(x.shape, dtype)

        return jax.tree.map(kept, self.abstract_params, is_leaf=is_quantized)

    def store(self, params: Params, dtype: jnp.dtype) -> Params:
        """Returns float32 parameters in this policy's weight format: in `dtype`, or quantized."""
        return jax.tree.map(
            lambda like, x: stored(x, like, dtype),
            self.abstract_params,
            params,
            is_leaf=is_quantized,
        )


def _format_axes(value: Any, axes: Any) -> Any:
    if isinstance(value, QuantizedWeight):
        return QuantizedWeight(axes, axes[: len(value.scale.shape)])
    return axes


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


@lru_cache
def initialize(
    init: Initializer,
    like: jax.ShapeDtypeStruct | QuantizedWeight,
    sharding: jax.sharding.Sharding | QuantizedWeight | None,
    dtype: jnp.dtype,
) -> Callable[[jax.Array], jax.Array | QuantizedWeight]:
    """Returns a compiled function that makes one parameter, sharded, from a random key."""

    def make(key: jax.Array) -> jax.Array | QuantizedWeight:
        return stored(init(key, like.shape, jnp.float32), like, dtype)

    # Each program runs once: on a CPU most LLVM passes cost more than they save (seen: 2.6 times).
    lighter = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    return jax.jit(make, out_shardings=sharding, compiler_options=lighter)
