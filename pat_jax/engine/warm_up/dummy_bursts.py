"""What decode programs are warmed up with: rows that are all live and near the end of their pages."""

from typing import Any

import numpy as np

from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.state import (
    Drafting,
    ModelDrafting,
    ReservedPages,
    RowState,
    Runs,
    abstract_drafting,
)
from pat_jax.engine.sequences.types import NO_TOKEN
from pat_jax.layout.layout import Layout
from pat_jax.programs.programs import Key

# Of a timed burst: what a burst does once counts for little, as in a rollout. Where few programs are measured
# one has to do, and what rollouts take corrects it.
BURST_CHECKS = 4


class DummyBursts:
    """The arguments of an engine's decode programs."""

    def __init__(self, engine: RolloutEngine):
        self.engine, self.programs, self.specs = engine, engine.programs, engine.specs

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

    def drafter(self, layout: Layout, rows: int, length: int) -> tuple[Any, ModelDrafting | None]:
        """Who says drafts, and a draft model's cache."""
        if not self.specs.drafts.of(rows):
            return None, None
        if not self.specs.draft_specs:
            return self.engine.weights.exit_head, None
        specs, model = self.specs.draft_specs, self.engine.draft_model
        assert model is not None, "set_draft_model comes first"
        pool = self.programs[Key("draft_allocate", layout.split)]()
        count, width = rows * layout.split.dp, specs.width(length)
        pages = np.arange(count * width) % (specs.pages(layout.split) - 1) + 1
        tables = pages.astype(np.int32).reshape(count, width)
        placed = layout.put((tables, np.zeros(count, np.int32)), "batch")
        return model.params, ModelDrafting(pool, *placed)

    def texts(self, layout: Layout, rows: int, length: int) -> Drafting | None:
        """Where drafts are copied: nothing to copy them from, for a step takes as long whatever it finds."""
        if self.specs.drafts.is_said or not self.specs.drafts.of(rows):
            return None
        size, drafts = self.specs.width(length) * self.specs.page_size, self.specs.drafts
        room = self.specs.text_room(length)
        like = abstract_drafting(layout, rows, size, drafts.longest, room)
        text: Any = np.full(like.text.shape, NO_TOKEN, np.int32)
        borders: Any = np.zeros(like.borders.shape, np.int32)
        return Drafting(text, Runs.none(len(text)), borders)
