"""How much of an update the rollout sees, which rounds adapters to what it computes in.

Knows adapters before and after an update. Does not know the base: the rollout's copy of it stays.
"""

from collections import defaultdict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pat_jax.models.lora import Adapter, Adapters

# [modules, *out, 2 rank] and [modules, 2 rank, *in] of a low-rank matrix
Factors = tuple[Array, Array]


def update_seen(
    before: Adapters, now: Adapters, *, scale: float, dtype: jnp.dtype
) -> Float[Array, ""]:
    """The rollout's change of its weights along that of the trainer's, as a share of the latter.

        ⟨Δr, Δt⟩ / ⟨Δt, Δt⟩,   Δ = b₁a₁ - b₀a₀ = (b₁ - b₀) a₁ + b₀ (a₁ - a₀),   over all adapters

    1: all of it is seen; 0: none of it, or what is seen has nothing to do with it. NaN where
    nothing was learned. Nothing is multiplied out: an inner product of b·a and d·c is that of bᵀd
    and a·cᵀ.

    Args:
      scale: of the products.
      dtype: in which the rollout keeps a and scale · b.
    """
    alike: dict[object, list[tuple[Adapter, Adapter]]] = defaultdict(list)
    for name, adapter in now.items():
        alike[adapter.a.shape, adapter.b.shape].append((before[name], adapter))
    seen, whole = jnp.zeros(()), jnp.zeros(())
    for pairs in alike.values():
        # Stacked: of as many programs' operations as there are shapes, not layers.
        first, then = jax.tree.map(lambda *xs: jnp.stack(xs), *pairs)
        trained = _change(first, then, scale, None)
        kept = _change(first, then, scale, dtype)
        seen += jnp.sum(jax.vmap(_inner)(trained, kept))
        whole += jnp.sum(jax.vmap(_inner)(trained, trained))
    return seen / whole


def _change(before: Adapter, now: Adapter, scale: float, dtype: jnp.dtype | None) -> Factors:
    def kept(x: Array) -> Array:
        if dtype is None:
            return x
        # Not a cast there and back, which compilers leave out.
        kind = jnp.finfo(dtype)
        return jax.lax.reduce_precision(x, kind.nexp, kind.nmant)

    a0, a1 = kept(before.a), kept(now.a)
    b0, b1 = kept(scale * before.b), kept(scale * now.b)
    return jnp.concatenate([b1 - b0, b0], axis=-1), jnp.concatenate([a1, a1 - a0], axis=1)


def _inner(one: Factors, other: Factors) -> Float[Array, ""]:
    (b, a), (d, c) = one, other
    out, into = tuple(range(b.ndim - 1)), tuple(range(1, a.ndim))
    outer = jnp.tensordot(b, d, axes=(out, out), precision="highest")
    return jnp.sum(outer * jnp.tensordot(a, c, axes=(into, into), precision="highest"))
