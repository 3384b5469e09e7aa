"""Kernels that are broken on purpose, interpreted on a CPU: each is found, and replaced."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pat_jax.models import paged_layer, row_attention
from pat_jax.models.kernel_choice import NAMES, Kernels
from pat_jax.profiling.measure import kernel_check
from pat_jax.profiling.measure.kernel_cases import Part
from pat_jax.profiling.measure.kernel_check import check_kernels

PART = Part(kv_heads=2, queries_per_kv=3, head_dim=16, page_size=8, dtype="float32")
INTERPRETED = Kernels("cpu").having(NAMES)
Kernel = Callable[..., jax.Array]


def looked_at(part: Part = PART, kept: Path | None = None) -> dict[str, str]:
    """What is wrong with each kernel."""
    found = check_kernels(jax.devices()[0], [part], INTERPRETED, kept=kept)
    return {one.name: one.trouble for one in found}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Breaks a CPU's kernels: each of those that are named becomes what `change` makes of it."""

    def break_them(change: Callable[[Kernel], Kernel], *names: str) -> None:
        pages = paged_layer.KERNELS["cpu"]
        changed = {name: change(getattr(pages, name)) for name in names if name != "rows"}
        monkeypatch.setitem(paged_layer.KERNELS, "cpu", pages._replace(**changed))
        if "rows" in names:
            rows = row_attention.KERNELS["cpu"]
            monkeypatch.setitem(row_attention.KERNELS, "cpu", change(rows))

    yield break_them
    jax.clear_caches()


def one_key_less(kernel: Kernel) -> Kernel:
    """Of rows over pages: the newest token is not seen."""

    def attend(queries: Any, keys: Any, values: Any, table: Any, at: Any, *trunk: Any) -> Any:
        return kernel(queries, keys, values, table, jnp.maximum(at - 1, 1), *trunk)

    return attend


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


def test_kernels_that_are_right_stay():
    assert looked_at() == dict.fromkeys(
        ("decode", "prefill", "verify", "rows forward", "rows backward"), ""
    )
    # Shapes that kernels over pages do not take are gathered by everybody.
    assert set(looked_at(replace(PART, head_dim=24))) == {"rows forward", "rows backward"}


@pytest.mark.parametrize(
    ("change", "kernel", "names"),
    [
        (one_key_less, "decode", {"decode"}),
        (one_key_less, "blocks", {"prefill", "verify"}),
        (nothing, "rows", {"rows forward", "rows backward"}),
        (wrong_gradient, "rows", {"rows backward"}),
    ],
)
def test_a_wrong_kernel_is_found(broken, change, kernel, names):
    broken(change, kernel)
    found = {name: trouble for name, trouble in looked_at().items() if trouble}
    assert set(found) == names
    assert all("is wrong (relative error" in trouble for trouble in found.values())


def test_a_kernel_that_does_not_compile_is_found(broken):
    broken(refused, "decode", "rows")
    found = {name: trouble for name, trouble in looked_at().items() if trouble}
    assert set(found) == {"decode", "rows forward", "rows backward"}
    assert found["decode"] == "does not run (NotImplementedError: no such instruction)"


def test_what_was_right_is_asked_once_and_what_was_wrong_again(broken, tmp_path, monkeypatch):
    path = tmp_path / "cache" / "kernels.json"
    broken(refused, "decode")
    assert looked_at(kept=path)["decode"]
    assert set(looked_at(kept=path)) == {"decode"}
    assert not [key for key in json.loads(path.read_text()) if '"decode"' in key]
    other = replace(PART, kv_heads=1)
    assert len(looked_at(other, kept=path)) == 5
    assert set(looked_at(kept=path)) == {"decode"}  # both are there
    for name, value in (("__version__", "of tomorrow"), ("sources", lambda: "edited")):
        with monkeypatch.context() as changed:
            changed.setattr(kernel_check, name, value)
            assert len(looked_at(kept=path)) == 5
    path.write_text("[3, {")
    assert len(looked_at(kept=path)) == 5
