"""What decode programs are warmed up with: rows that are all live and near the end of their pages."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.state import ReservedPages, RowState
from pat_jax.layout.layout import Layout

# Of a timed burst: what a burst does once counts for little, as in a rollout. Where few programs are measured
# one has to do, and what rollouts take corrects it.
BURST_CHECKS = 4


class DummyBursts:
    """The arguments of an engine's decode programs."""

    def __init__(self, engine: RolloutEngine):
        self.engine, self.specs = engine, engine.specs

    def tables(self, layout: Layout, rows: int, length: int) -> np.ndarray:
        """Every row another page, as far as there are as many."""
        width = self.specs.width(length)
        pages = np.arange(rows * width) % (self.specs.pages[layout.split] - 1) + 1
        return np.tile(pages.astype(np.int32).reshape(rows, width), (layout.split.dp, 1))

    def burst(
        self, layout: Layout, rows: int, length: int, budget: int
    ) -> tuple[int, RowState, ReservedPages]:
        """The steps of a burst that is timed, its rows, and their pages: it never runs out of them."""
        pace = self.specs.functions.pace(budget)
        checks = 1 if self.specs.first else BURST_CHECKS
        steps = min(pace.burst_steps, checks * pace.check_every)
        state = RowState.empty(rows * layout.split.dp)
        state.live[:], state.ignore_eos[:] = True, True
        state.position[:], state.end[:] = max(0, length - steps), length + steps
        # The tables are full, and rows may run past their ends.
        ring = np.zeros((layout.split.dp, self.specs.shapes.reserve_size(rows, budget)), np.int32)
        return steps, state, ReservedPages(ring, np.full(layout.split.dp, 2**30, np.int32))

    def drafting(self, layout: Layout, rows: int, length: int) -> Callable[[], Any]:
        """Makes what the drafter proposes from; bursts take it over."""
        drafter, num_groups = self.specs.drafter, layout.split.dp
        like = drafter.state(layout, rows, length, self.specs.draft_shapes)

        def blank() -> Any:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
            return drafter.blank(zeros, num_groups)

        return jax.jit(blank, out_shardings=jax.tree.map(lambda x: x.sharding, like))
