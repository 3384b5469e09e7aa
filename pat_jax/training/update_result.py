"""The result of an update: metrics of its optimizer steps, and which of them were applied.

One metric is the share of an update that the rollout sees after it rounds the adapters to its own
dtype.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pat_jax.models.adapted_modules import is_stack
from pat_jax.models.lora import Adapter, Adapters
from pat_jax.rl.algorithm.losses import Sums
from pat_jax.rl.algorithm.update import TrainState, Update

# What an optimizer step returns: sums for metrics, the gradient's norm, and whether it was applied.
Record = tuple[Sums, Array, Array]
Factors = tuple[Array, Array]  # [*out, 2 rank] and [2 rank, *in] of a low-rank matrix


@dataclass(frozen=True)
class UpdateResult:
    metrics: dict[str, float]
    applied: tuple[bool, ...]  # for each optimizer step, whether the gradient was finite
    updates_applied: int  # number of applied optimizer steps since the state's optimizer began


def summarized(
    role: str, update: Update, records: Sequence[Record], state: TrainState
) -> UpdateResult:
    """Returns the result of a role's optimizer steps, fetched from the devices at once. `state` is
    the training state after the last step."""
    fetched, step = jax.device_get((list(records), state.step))
    sums, norms, applied = zip(*fetched, strict=True)
    metrics = {f"{role}/{name}": value for name, value in update.summary(sums).items()}
    counted = [norm for norm, one in zip(norms, sums, strict=True) if one["weight"] > 0]
    metrics[f"{role}/grad_norm"] = float(np.mean(counted)) if counted else math.nan
    metrics[f"{role}/skipped_updates"] = float(len(applied) - sum(applied))
    return UpdateResult(metrics, tuple(map(bool, applied)), int(step))


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
