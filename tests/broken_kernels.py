"""Kernels that are broken on purpose, on a CPU, where those of a GPU are interpreted."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pat_jax.models.cache import paged_layer
from pat_jax.models.kernels import expert_mlp, row_attention
from pat_jax.models.kernels.kernel_choice import NAMES, Kernels

INTERPRETED = Kernels("cpu").having(NAMES)
Kernel = Callable[..., jax.Array]


def break_kernels(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Kernel], Kernel],
    *names: str,
    platform: str = "cpu",
) -> None:
    """Each of those that are named becomes what `change` makes of it; what is compiled is forgotten."""
    jax.clear_caches()
    pages = paged_layer.KERNELS[platform]
    changed = {name: change(getattr(pages, name)) for name in names if name in pages._fields}
    monkeypatch.setitem(paged_layer.KERNELS, platform, pages._replace(**changed))
    if "rows" in names:
        rows = row_attention.KERNELS[platform]
        monkeypatch.setitem(row_attention.KERNELS, platform, change(rows))
    if "experts" in names:
        experts: Any = expert_mlp.KERNELS[platform]
        broken = experts._replace(of=change(experts.of))
        monkeypatch.setitem(expert_mlp.KERNELS, platform, broken)


def one_key_less(kernel: Kernel) -> Kernel:
    """Of rows over pages: the newest token is not seen."""

    def attend(queries: Any, keys: Any, values: Any, table: Any, at: Any, *trunk: Any) -> Any:
        return kernel(queries, keys, values, table, jnp.maximum(at - 1, 1), *trunk)

    return attend


def one_row_less(kernel: Kernel) -> Kernel:
    """Of experts: the first row's are not computed."""
    return lambda chosen, *sizes: kernel(chosen.at[0].set(-1), *sizes)


def nothing(kernel: Kernel) -> Kernel:
    return lambda *arrays: kernel(*arrays) * jnp.nan


def refused(kernel: Kernel) -> Kernel:
    def attend(*_: Any) -> Any:
        raise NotImplementedError("no such\ninstruction")

    return attend


def wrong_gradient(kernel: Kernel) -> Kernel:
    """Of the keys, whose gradient comes without that of half of the queries."""

    @jax.custom_vjp
    def attend(*arrays: Any) -> Any:
        return kernel(*arrays)

    def forward(*arrays: Any) -> Any:
        out, back = jax.vjp(lambda *x: kernel(*x, arrays[3]), *arrays[:3])
        return out, back

    def backward(back: Any, grads: Any) -> Any:
        to_queries, _, to_values = back(grads)
        return to_queries, back(grads.at[:, ::2].set(0))[1], to_values, None

    attend.defvjp(forward, backward)
    return attend
