"""A transformer taken apart: what is static, what is learned, and how the learned arrays are named."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from flax import nnx

from pat_jax.models.config import ModelConfig
from pat_jax.models.transformer import Initializer, Keys, Transformer

Params = nnx.State  # a pytree of arrays, one leaf a parameter


@dataclass(frozen=True)
class Policy:
    """The static half of a model. Its parameters travel beside it, as a pytree of arrays."""

    config: ModelConfig
    definition: nnx.GraphDef
    abstract_params: Params  # ShapeDtypeStructs, float32

    @classmethod
    def from_config(cls, config: ModelConfig) -> "Policy":
        model = nnx.eval_shape(lambda: Transformer(config, keys=Keys(jax.random.key(0))))
        definition, abstract_params = nnx.split(model, nnx.Param)
        return cls(config, definition, abstract_params)

    def bind(self, params: Params) -> Transformer:
        return nnx.merge(self.definition, params)

    def init(
        self, seed: int, shardings: Params | None = None, dtype: jnp.dtype = jnp.float32
    ) -> Params:
        """Random parameters, each made on its own shards.

        One small program for each shape rather than one large program for the model: that one takes
        minutes to compile.
        """
        variables, tree = jax.tree.flatten(self.abstract_params, is_leaf=_is_variable)
        placed = [None] * len(variables) if shardings is None else jax.tree.leaves(shardings)
        keys = [jax.random.fold_in(jax.random.key(seed), i) for i in range(len(variables))]
        return jax.tree.unflatten(
            tree,
            [
                variable.replace(
                    _initialize(variable.get_metadata()["init"], variable.shape, sharding, dtype)(
                        key
                    )
                )
                for variable, sharding, key in zip(variables, placed, keys, strict=True)
            ],
        )

    def param_axes(self) -> Params:
        """The same tree as the parameters, with a tuple of axis names in place of each array."""
        return jax.tree.map(
            lambda variable: variable.replace(variable.get_metadata()["axes"]),
            self.abstract_params,
            is_leaf=_is_variable,
        )

    def abstract(self, dtype: jnp.dtype) -> Params:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), self.abstract_params)


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


@lru_cache
def _initialize(
    init: Initializer,
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding | None,
    dtype: jnp.dtype,
) -> Callable[[jax.Array], jax.Array]:
    def make(key: jax.Array) -> jax.Array:
        return init(key, shape, jnp.float32).astype(dtype)

    return jax.jit(make, out_shardings=sharding)
