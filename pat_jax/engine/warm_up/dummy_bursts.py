"""Dummy bursts that warm up and time decode programs, with all rows near their longest length."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.engine.by_need import decode_key
from pat_jax.engine.device.programs.program_specs import ProgramSpecs
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.state import (
    DecodeState,
    Pool,
    ReservedPages,
    RowState,
    Until,
    seen_shape,
)
from pat_jax.engine.warm_up.timings import Timed
from pat_jax.layout.buckets import Shape
from pat_jax.layout.layout import Layout
from pat_jax.planning.draft_counts import KINDS, MAX_RUN

# A timed burst has this many times `check_every` steps, so that its fixed cost counts for little,
# as in a rollout. If few programs are measured, it has them once; rollouts correct the time.
BURST_CHECKS = 4


def dummy_tables(
    specs: ProgramSpecs, layout: Layout, rows: int, length: int, compiled: int
) -> np.ndarray:
    """Returns page tables for a program compiled for rows of `compiled` tokens. Their rows hold
    `length` tokens, in different pages as far as the pool has enough."""
    width = specs.width(length)
    pages = np.arange(rows * width, dtype=np.int32) % (specs.pages[layout.split] - 1) + 1
    free = specs.width(compiled) - width
    tables = np.pad(pages.reshape(rows, width), ((0, 0), (0, free)), constant_values=NULL_PAGE)
    return np.tile(tables, (layout.split.dp, 1))


class DummyBursts:
    """Dummy bursts with `rows` rows per replica of a layout, of up to `length` tokens each."""

    def __init__(self, engine: RolloutEngine, layout: Layout, rows: int, length: int, pool: Pool):
        """
        Args:
          pool: pages of the KV cache, overwritten by every burst.
        """
        self.engine = engine
        self.programs = engine.programs
        self.specs = engine.specs
        self.layout = layout
        self.rows = rows
        self.length = length
        self.pool = pool

    def timed(self, num_draft_tokens: int) -> Timed:
        """Returns a burst to time, with `num_draft_tokens` per row and all rows running."""
        shape = Shape(self.layout.split, self.rows, self.length, num_draft_tokens)
        compiled = self.specs.shapes.length_for(self.length, num_draft_tokens)
        program = self.programs[decode_key(shape._replace(length=compiled))]
        steps, state, reserved = self._burst(num_draft_tokens)
        is_copied = num_draft_tokens > 0 and not self.specs.drafts.is_generated
        accept_prob = np.zeros((2, KINDS, 1 + MAX_RUN), np.float32) if is_copied else None
        until = Until(np.int32(steps), np.int32(0), accept_prob)
        blank = self._blank_drafting(compiled) if num_draft_tokens else None
        tables = dummy_tables(self.specs, self.layout, self.rows, self.length, compiled)
        once = partial(self._run, program, state, tables, reserved, until, blank)
        if num_draft_tokens:
            return Timed("verify_table", tuple(shape), once, per=steps)
        return Timed("decode_table", shape[:3], once, per=steps)

    def _run(
        self,
        program: Callable[..., Any],
        state: RowState,
        tables: np.ndarray,
        reserved: ReservedPages,
        until: Until,
        blank: Callable[[], Any] | None,
    ) -> float:
        """Runs a burst and returns its seconds. Every run starts from the same positions."""
        layout = self.layout
        dp = self.layout.split.dp
        unseen = np.zeros(seen_shape(self.engine.policy.config, self.rows * dp), np.uint32)
        none_drawn = np.zeros(dp, np.int32)
        told = state, unseen, tables, none_drawn
        rows, seen, pages, drawn = layout.put(told, "batch")
        drafting = blank() if blank else None
        own_params = self.engine.draft_params if blank else None
        jax.block_until_ready((rows, drafting))
        carried = DecodeState(rows, seen, self.pool, pages, drawn, drafting)
        start = time.perf_counter()
        carried, _ = jax.block_until_ready(
            program(self.engine.params, carried, reserved, until, own_params)
        )
        self.pool = carried.pool
        return time.perf_counter() - start

    def _burst(self, num_draft_tokens: int) -> tuple[int, RowState, ReservedPages]:
        """The steps of a timed burst, the state of its rows, and a reserve that always lasts."""
        pace = self.specs.functions.pace(num_draft_tokens)
        dp = self.layout.split.dp
        length = self.length
        checks = 1 if self.specs.first else BURST_CHECKS
        steps = min(pace.burst_steps, checks * pace.check_every)
        state = RowState.empty(self.rows * dp)
        state.running[:] = True
        state.ignore_eos[:] = True
        state.position[:] = max(0, length - steps)
        state.end[:] = length + steps
        # The tables are full, and rows may run past their ends.
        ring = np.zeros((dp, self.specs.shapes.reserve_size(self.rows, num_draft_tokens)), np.int32)
        return steps, state, ReservedPages(ring, np.full(dp, 2**30, np.int32))

    def _blank_drafting(self, compiled: int) -> Callable[[], Any]:
        """Returns a function that makes the drafter's state, which a burst consumes."""
        drafter = self.specs.drafter
        num_replicas = self.layout.split.dp
        like = drafter.state(self.layout, self.rows, compiled, self.specs.draft_shapes)

        def blank() -> Any:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
            return drafter.blank(zeros, num_replicas)

        return jax.jit(blank, out_shardings=jax.tree.map(lambda x: x.sharding, like))
