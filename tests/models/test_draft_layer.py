"""The caches of steps that verify trees of drafts, against attention in float64, token by token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from projections import as_they_are

from pat_jax.engine.device.token_batch import line_of
from pat_jax.models.cache.draft_layer import DraftCopy, DraftPages, DraftRows
from pat_jax.models.cache.paged_layer import NULL_PAGE, PagedLayer
from pat_jax.models.kernels.kernel_choice import ANYWHERE

ROWS, HEADS, GROUP, DIM = 3, 2, 2, 8
PAGE_SIZE, WIDTH, DRAFT = 4, 5, 4
LENGTH = PAGE_SIZE * WIDTH
line = jax.jit(partial(line_of, room=ROWS * (1 + DRAFT), turns=1 + DRAFT))
sizes = st.tuples(st.integers(0, DRAFT), st.integers(0, DRAFT)).filter(lambda x: sum(x) <= DRAFT)


class Trees:
    """Rows of random texts, each with a draft and a branch of so many tokens."""

    def __init__(self, seed: int, starts: list[int], lengths: list[tuple[int, int]]):
        rng = np.random.default_rng(seed)
        self.starts, self.lengths = starts, lengths

        def normal(*shape: int) -> Any:
            return jnp.asarray(rng.normal(size=shape), jnp.float32)

        self.keys, self.values = (normal(ROWS * WIDTH + 1, HEADS, PAGE_SIZE, DIM) for _ in range(2))
        table = (rng.permutation(ROWS * WIDTH) + 1).reshape(ROWS, WIDTH)
        self.layer = PagedLayer(self.keys, self.values, jnp.asarray(table, jnp.int32))
        trunk, branch = (jnp.asarray(x, jnp.int32) for x in zip(*lengths, strict=True))
        running, start = jnp.ones(ROWS, bool), jnp.asarray(starts, jnp.int32)
        self.line = line(trunk, running, start, branch)
        tokens = len(self.line.row)
        self.new = normal(1, tokens, HEADS, DIM), normal(1, tokens, HEADS, DIM)
        self.queries = normal(1, tokens, HEADS, GROUP, DIM)

    def cache(self, kind: type) -> DraftPages | DraftRows:
        if kind is DraftPages:
            behind = ((0, 0), (0, 2))
            table = jnp.pad(self.layer.table, behind, constant_values=NULL_PAGE)
            return DraftPages(self.keys, self.values, table, self.line)
        return DraftRows(DraftCopy.begin(self.layer, 1 + DRAFT), self.line)

    def token(self, row: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """The key and the value of a new one, [kv_heads, head_dim]."""
        place = int(self.line.place[row, turn])
        keys, values = (np.asarray(x[0, place], np.float64) for x in self.new)
        return keys, values

    def expected(self, row: int, turn: int) -> np.ndarray:
        """[kv_heads, queries_per_kv, head_dim]"""
        trunk, start = self.lengths[row][0], self.starts[row]
        known = [np.asarray(x[row, :, :start], np.float64) for x in self.layer.gather()]
        path = [0, *range(trunk + 1, turn + 1)] if turn > trunk else range(turn + 1)
        mine = [np.stack(x, axis=1) for x in zip(*(self.token(row, i) for i in path), strict=True)]
        keys, values = (np.concatenate(x, axis=1) for x in zip(known, mine, strict=True))
        queries = np.asarray(self.queries[0, int(self.line.place[row, turn])], np.float64)
        scores = np.einsum("hgd,hsd->hgs", queries, keys) / np.sqrt(DIM)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("hgs,hsd->hgd", weights, values)


def kept(cache: DraftPages | DraftRows, row: int, slot: int) -> np.ndarray:
    """The key that is there, [kv_heads, head_dim]."""
    if isinstance(cache, DraftPages):
        page = cache.table[row, slot // PAGE_SIZE]
        return np.asarray(cache.keys[page, :, slot % PAGE_SIZE])
    return np.asarray(cache.copy.keys).reshape(ROWS, HEADS, DIM, -1)[row, :, :, slot]


@jax.jit
def attend(cache: Any, queries: Any, keys: Any, values: Any, positions: Any) -> Any:
    return cache.attend(as_they_are(queries, keys, values), positions, ANYWHERE)


@jax.jit
def on_branch(cache: Any, taken: Any) -> Any:
    return cache.on_branch(taken)


trees = st.builds(
    Trees,
    st.integers(0, 99),
    st.lists(st.integers(0, LENGTH - 1 - DRAFT), min_size=ROWS, max_size=ROWS),
    st.lists(sizes, min_size=ROWS, max_size=ROWS),
)


@pytest.mark.parametrize("kind", [DraftPages, DraftRows])
@settings(max_examples=6)
@given(trees)
def test_a_token_sees_its_row_and_its_own_path(kind, tree):
    queries, position = tree.queries, jnp.zeros((1, len(tree.line.row)), jnp.int32)
    attended, _ = attend(tree.cache(kind), queries, *tree.new, position)
    for row, (trunk, branch) in enumerate(tree.lengths):
        for turn in range(1 + trunk + branch):
            found = np.asarray(attended[0, int(tree.line.place[row, turn])])
            np.testing.assert_allclose(found, tree.expected(row, turn), atol=2e-5)


@pytest.mark.parametrize("kind", [DraftPages, DraftRows])
@settings(max_examples=6)
@given(trees, st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
def test_a_branch_that_is_right_is_found_where_its_positions_are(kind, tree, taken):
    queries, position = tree.queries, jnp.zeros((1, len(tree.line.row)), jnp.int32)
    _, cache = attend(tree.cache(kind), queries, *tree.new, position)
    moved = on_branch(cache, jnp.asarray(taken))
    for row, (trunk, branch) in enumerate(tree.lengths):
        start, is_taken = tree.starts[row], taken[row]
        for i in range(1, 1 + (branch if is_taken else trunk)):
            key, _ = tree.token(row, trunk + i if is_taken else i)
            np.testing.assert_array_equal(kept(moved, row, start + i), key.astype(np.float32))
        for slot in range(start + 1):
            np.testing.assert_array_equal(kept(moved, row, slot), kept(cache, row, slot))
