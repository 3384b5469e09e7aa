"""The share of an update that the rollout sees after it rounds the adapters to its own dtype.

Knows adapters before and after an update. Does not know the base, which does not change.
"""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pat_jax.models.adapted_modules import is_stack
from pat_jax.models.lora import Adapter, Adapters

Factors = tuple[Array, Array]  # [*out, 2 rank] and [2 rank, *in] of a low-rank matrix


def update_seen(
    before: Adapters, now: Adapters, *, scale: float, dtype: jnp.dtype
) -> Float[Array, ""]:
    """Returns the rollout's change of weights Δr along the trainer's change Δt, as a share of Δt.

        ⟨Δr, Δt⟩ / ⟨Δt, Δt⟩,   Δ = b₁a₁ - b₀a₀ = (b₁ - b₀) a₁ + b₀ (a₁ - a₀),   over all adapters

    1 means that the rollout sees the whole update, 0 that it sees nothing of it. NaN means that
    nothing was learned. No product b·a is computed as a matrix: ⟨b·a, d·c⟩ = ⟨bᵀd, a·cᵀ⟩.

    Args:
      before, now: adapters before and after the update.
      scale: factor of the products b·a.
      dtype: dtype in which the rollout keeps a and scale · b.
    """

    def inner(first: Adapter, then: Adapter) -> tuple[Array, Array]:
        trained = _change(first, then, scale, None)
        return _inner(trained, _change(first, then, scale, dtype)), _inner(trained, trained)

    alike: dict[tuple[Any, ...], list[tuple[Adapter, Adapter]]] = defaultdict(list)
    for name, adapter in now.items():
        if not isinstance(adapter, Adapter):
            continue
        pairs = zip(_apart(before[name]), _apart(adapter), strict=True)
        for first, then in pairs:
            alike[is_stack(name), then.a.shape, then.b.shape].append((first, then))
    seen, whole = jnp.zeros(()), jnp.zeros(())
    for (has_experts, *_), pairs in alike.items():
        # Stacked, so that the program grows with the number of shapes, not of layers.
        first, then = jax.tree.map(lambda *xs: jnp.stack(xs), *pairs)
        of_each = jax.vmap(jax.vmap(inner) if has_experts else inner)
        of_seen, of_whole = of_each(first, then)
        seen, whole = seen + jnp.sum(of_seen), whole + jnp.sum(of_whole)
    return seen / whole


def _apart(adapter: Adapter) -> list[Adapter]:
    """Splits an adapter whose factor a is shared by several weights into one adapter for each."""
    parts = adapter.b if isinstance(adapter.b, list) else [adapter.b]
    return [Adapter(adapter.a, b) for b in parts]


def _change(before: Adapter, now: Adapter, scale: float, dtype: jnp.dtype | None) -> Factors:
    def kept(x: Array) -> Array:
        if dtype is None:
            return x
        # Not a cast there and back, which compilers remove.
        kind = jnp.finfo(dtype)
        return jax.lax.reduce_precision(x, kind.nexp, kind.nmant)

    a0, a1 = kept(before.a), kept(now.a)
    b0, b1 = kept(scale * before.b), kept(scale * now.b)
    return jnp.concatenate([b1 - b0, b0], axis=-1), jnp.concatenate([a1, a1 - a0], axis=0)


def _inner(one: Factors, other: Factors) -> Float[Array, ""]:
    b, a = one
    d, c = other
    out = tuple(range(b.ndim - 1))
    into = tuple(range(1, a.ndim))
    outer = jnp.tensordot(b, d, axes=(out, out), precision="highest")
    return jnp.sum(outer * jnp.tensordot(a, c, axes=(into, into), precision="highest"))
