"""The kernel that finishes and appends tokens, interpreted, against float64; and products in parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.models.cache.draft_layer import DraftPages, Line
from pat_jax.models.cache.paged_layer import NULL_PAGE, PagedLayer
from pat_jax.models.kernels.kernel_choice import ANYWHERE, Kernels
from pat_jax.models.layers import Rotation
from pat_jax.models.projected import Projected, in_parts

ROWS, HEADS, GROUP, DIM, PAGE_SIZE, EPS = 4, 2, 3, 16, 8, 1e-2
KERNELS = Kernels("cpu").having(["decode", "verify"])
TOLERANCE = {"float32": 3e-6, "bfloat16": 3e-2}


class Tokens:
    """A random token of each row; row 2 has no page, and row 3 stands behind its table."""

    def __init__(self, dtype: str, num_parts: int, has_norms: bool):
        rng = np.random.default_rng(num_parts)
        counts = HEADS * GROUP, HEADS, HEADS
        self.parts = [rng.normal(size=(num_parts, ROWS, 1, n, DIM)) for n in counts]
        if num_parts == 1:  # these come rounded
            self.parts = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in self.parts]
        self.angles = rng.uniform(0, 6, size=(ROWS, 1, DIM // 2))
        self.scales = list(rng.uniform(0.5, 2, size=(2, DIM))) if has_norms else []
        self.pools = np.asarray(rng.normal(size=(2, 9, HEADS, PAGE_SIZE, DIM)), dtype)
        self.table = np.array([[3, 5], [8, 1], [NULL_PAGE] * 2, [4, 2]], np.int32)
        self.start, self.dtype = np.array([11, 0, 5, 2 * PAGE_SIZE], np.int32), dtype

    def projected(self, form: str) -> Projected:
        whole = [jnp.asarray(x.sum(axis=0), self.dtype) for x in self.parts]
        queries, keys, values = whole
        queries = jnp.reshape(queries, (ROWS, 1, HEADS, GROUP, DIM))
        halves = Rotation(*(jnp.asarray(f(self.angles), jnp.float32) for f in (np.cos, np.sin)))
        norms = (jnp.asarray(self.scales[0]), jnp.asarray(self.scales[1])) if self.scales else None
        parts = [jnp.asarray(x, jnp.float32) for x in self.parts]
        given = {"none": (), "three": tuple(parts), "one": (jnp.concatenate(parts, axis=3),)}
        return Projected(queries, keys, values, halves, norms, EPS, given[form])

    def layer(self) -> PagedLayer:
        keys, values = map(jnp.asarray, self.pools)
        return PagedLayer(keys, values, jnp.asarray(self.table))

    def finished(self, which: int) -> np.ndarray:
        """Queries, keys or values, [rows, heads, head_dim]."""
        x = self.parts[which].sum(axis=0)[:, 0]
        if which == 2:
            return x
        if self.scales:
            x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * self.scales[which]
        pairs = x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]
        turned = pairs * np.exp(1j * self.angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def expected_pools(self) -> np.ndarray:
        pools = self.pools.astype(np.float64)
        pools[:, NULL_PAGE, :, self.start[2:] % PAGE_SIZE] = 0
        for row in (0, 1):
            page = self.table[row, self.start[row] // PAGE_SIZE]
            for which in (0, 1):
                token = self.finished(1 + which)[row]
                pools[which, page, :, self.start[row] % PAGE_SIZE] = token
        return pools


@pytest.mark.parametrize("form", ["none", "three", "one"])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tokens_are_finished_and_appended_to_their_pages_alone(form, has_norms, dtype):
    tokens = Tokens(dtype, 1 if form == "none" else 4, has_norms)
    new, start = tokens.projected(form), jnp.asarray(tokens.start)
    queries, layer = tokens.layer().append(new, start, KERNELS)
    assert queries.dtype == layer.keys.dtype == layer.values.dtype == dtype
    wanted = tokens.finished(0).reshape(ROWS, 1, HEADS, GROUP, DIM)
    close: Any = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    np.testing.assert_allclose(np.asarray(queries, np.float64), wanted, **close)
    found = np.asarray([layer.keys, layer.values], np.float64)
    np.testing.assert_allclose(found, tokens.expected_pools(), **close)


def test_without_the_kernel_the_same_is_appended():
    tokens = Tokens("float32", 4, has_norms=True)
    new, start = tokens.projected("one"), jnp.asarray(tokens.start)
    for one, other in zip(
        jax.tree.leaves(tokens.layer().append(new, start, KERNELS)),
        jax.tree.leaves(tokens.layer().append(new, start, ANYWHERE)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=3e-6)


def lines(num_tokens: int) -> tuple[Line, Projected]:
    """Row 0 verifies all tokens but one; row 1 has one."""
    rng = np.random.default_rng(0)
    row = np.array([0] * (num_tokens - 1) + [1], np.int32)
    turn = np.array([*range(num_tokens - 1), 0], np.int32)
    place = np.array([[*range(num_tokens - 1)], [num_tokens - 1] * (num_tokens - 1)], np.int32)
    start = jnp.array([PAGE_SIZE - 2, 3])
    line = Line(
        jnp.array(row), jnp.ones(num_tokens, bool), jnp.array(turn), jnp.array(place), start
    )
    shapes = (HEADS, GROUP, DIM), (HEADS, DIM), (HEADS, DIM)
    queries, keys, values = (
        jnp.asarray(rng.normal(size=(1, num_tokens, *of)), jnp.float32) for of in shapes
    )
    angles = jnp.asarray(rng.uniform(size=(1, num_tokens, DIM // 2)), jnp.float32)
    return line, Projected(queries, keys, values, Rotation(jnp.cos(angles), jnp.sin(angles)))


def test_tokens_of_drafts_are_appended_by_the_kernel_as_without_it():
    """Over the border of a page."""
    line, new = lines(5)
    keys, values = jnp.asarray(Tokens("float32", 1, has_norms=False).pools)
    pages = DraftPages(keys, values, jnp.array([[3, 5], [8, 1]]), line)
    positions = jnp.zeros((1, 5), jnp.int32)  # the line has them
    by_kernel, plain = (pages.attend(new, positions, one) for one in (KERNELS, ANYWHERE))
    for one, other in zip(jax.tree.leaves(by_kernel), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6)


@pytest.mark.parametrize(("tokens", "arrays", "parts"), [(1, 3, 8), (2, 1, 8), (2**10, 1, 2)])
def test_parts_of_a_product_add_up_to_it(tokens, arrays, parts):
    rng = np.random.default_rng(tokens)
    x = rng.normal(size=(tokens, 1, 2048))
    weights = [rng.normal(size=(*of, DIM, 2048)) for of in ((HEADS, GROUP), (16,), (40,))]
    found = in_parts(jnp.asarray(x, jnp.float32), [jnp.asarray(w, jnp.float32) for w in weights])
    assert len(found) == arrays and {len(each) for each in found} == {parts}
    whole = np.concatenate([np.sum(np.asarray(each, np.float64), axis=0) for each in found], axis=2)
    wanted = [np.einsum("rti,ndi->rtnd", x, w.reshape(-1, DIM, 2048)) for w in weights]
    np.testing.assert_allclose(whole, np.concatenate(wanted, axis=2), atol=2e-3)
