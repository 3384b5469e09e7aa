"""What decode programs are warmed up with: rows that are all live and near the end of their pages."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from pat_jax.engine.device.programs.program_specs import ProgramSpecs
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.state import (
    DecodeState,
    Drafting,
    ModelDrafting,
    Pool,
    ReservedPages,
    RowState,
    Runs,
    Until,
    abstract_drafting,
    seen_shape,
)
from pat_jax.engine.sequences.types import NO_TOKEN
from pat_jax.engine.warm_up.timings import Timed
from pat_jax.layout.layout import Layout
from pat_jax.planning.drafts import KINDS, MOST
from pat_jax.programs.programs import Key

# Of a timed burst: what a burst does once counts for little, as in a rollout. Where few programs are measured
# one has to do, and what rollouts take corrects it.
BURST_CHECKS = 4


def dummy_tables(specs: ProgramSpecs, layout: Layout, rows: int, length: int) -> np.ndarray:
    """Every row another page, as far as there are as many."""
    width = specs.width(length)
    pages = np.arange(rows * width) % (specs.pages[layout.split] - 1) + 1
    return np.tile(pages.astype(np.int32).reshape(rows, width), (layout.split.dp, 1))


class DummyBursts:
    """Bursts of so many rows of a layout, each of up to `length` tokens."""

    def __init__(self, engine: RolloutEngine, layout: Layout, rows: int, length: int, pool: Pool):
        """
        Args:
          pool: overwritten by every burst.
        """
        self.engine, self.programs, self.specs = engine, engine.programs, engine.specs
        self.layout, self.rows, self.length, self.pool = layout, rows, length, pool
        self._drafter, self._asking = self._drafter_and_cache()
        self._texts = self._nothing_to_copy()
        self._tables = dummy_tables(self.specs, layout, rows, length)

    def timed(self, budget: int) -> Timed:
        """A burst with so many draft tokens for each row: every row live and near the end of its pages."""
        at = self.layout.split, self.rows, self.length
        program = self.programs[Key("decode", *at, budget=budget)]
        steps, state, reserved = self._burst(budget)
        is_copied = budget > 0 and self._texts is not None
        reach = np.zeros((2, KINDS, 1 + MOST), np.float32) if is_copied else None
        until = Until(np.int32(steps), np.int32(0), reach)
        once = partial(self._run, program, state, reserved, until, has_drafts=budget > 0)
        if budget:
            return Timed("verify_table", (*at, budget), once, per=steps)
        return Timed("decode_table", at, once, per=steps)

    def _run(
        self,
        program: Callable[..., Any],
        state: RowState,
        reserved: ReservedPages,
        until: Until,
        *,
        has_drafts: bool,
    ) -> float:
        """Returns its seconds. Positions go back to where they were: each run writes the same tokens."""
        layout, dp = self.layout, self.layout.split.dp
        unseen = np.zeros(seen_shape(self.engine.policy.config, self.rows * dp), np.uint32)
        none_drawn = np.zeros(dp, np.int32)
        told = state, unseen, self._tables, none_drawn, self._texts if has_drafts else None
        rows, seen, pages, drawn, drafting = layout.put(told, "batch")
        jax.block_until_ready(rows)
        asking, drafter = (self._asking, self._drafter) if has_drafts else (None, None)
        carried = DecodeState(rows, seen, self.pool, pages, drawn, drafting, asking)
        start = time.perf_counter()
        carried, _ = jax.block_until_ready(
            program(self.engine.params, carried, reserved, until, drafter)
        )
        self.pool = carried.pool
        if has_drafts:
            self._asking = carried.asking
        return time.perf_counter() - start

    def _burst(self, budget: int) -> tuple[int, RowState, ReservedPages]:
        """The steps of a burst that is timed, its rows, and their pages: it never runs out of them."""
        pace, dp, length = self.specs.functions.pace(budget), self.layout.split.dp, self.length
        checks = 1 if self.specs.first else BURST_CHECKS
        steps = min(pace.burst_steps, checks * pace.check_every)
        state = RowState.empty(self.rows * dp)
        state.live[:], state.ignore_eos[:] = True, True
        state.position[:], state.end[:] = max(0, length - steps), length + steps
        # The tables are full, and rows may run past their ends.
        ring = np.zeros((dp, self.specs.shapes.reserve_size(self.rows, budget)), np.int32)
        return steps, state, ReservedPages(ring, np.full(dp, 2**30, np.int32))

    def _drafter_and_cache(self) -> tuple[Any, ModelDrafting | None]:
        """Who says drafts, and a draft model's cache."""
        if not self.specs.drafts.of(self.rows):
            return None, None
        if not self.specs.draft_specs:
            return self.engine.weights.exit_head, None
        layout, specs, model = self.layout, self.specs.draft_specs, self.engine.draft_model
        assert model is not None, "set_draft_model comes first"
        pool = self.programs[Key("draft_allocate", layout.split)]()
        count, width = self.rows * layout.split.dp, specs.width(self.length)
        pages = np.arange(count * width) % (specs.pages(layout.split) - 1) + 1
        tables = pages.astype(np.int32).reshape(count, width)
        placed = layout.put((tables, np.zeros(count, np.int32)), "batch")
        return model.params, ModelDrafting(pool, *placed)

    def _nothing_to_copy(self) -> Drafting | None:
        """Where drafts are copied: nothing to copy them from, for a step takes as long whatever it finds."""
        if self.specs.drafts.is_said or not self.specs.drafts.of(self.rows):
            return None
        size, longest = (
            self.specs.width(self.length) * self.specs.page_size,
            self.specs.drafts.longest,
        )
        room = self.specs.text_room(self.length)
        like = abstract_drafting(self.layout, self.rows, size, longest, room)
        text: Any = np.full(like.text.shape, NO_TOKEN, np.int32)
        borders: Any = np.zeros(like.borders.shape, np.int32)
        return Drafting(text, Runs.none(len(text)), borders)
