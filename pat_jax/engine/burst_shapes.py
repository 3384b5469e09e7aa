"""Which program the next burst runs, and for how many steps.

Knows buckets and the rows of a table. Does not know pages, nor why a burst ends.
"""

from typing import TYPE_CHECKING

from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.layout.buckets import Shape, Shapes
from pat_jax.planning.types import Plan, Ran, Split

if TYPE_CHECKING:
    from pat_jax.engine.by_need import ByNeed  # knows programs: simulated rollouts have none


class BurstShapes:
    """The shapes of one rollout's bursts."""

    def __init__(self, shapes: Shapes, table: SequenceTable, by_need: "ByNeed | None"):
        """
        Args:
          by_need: chooses among compiled programs; None: all are compiled.
        """
        self.shapes, self.table, self.by_need = shapes, table, by_need
        # What the newest burst would have run in with the plan's drafts, had it been compiled, and the seconds
        # that these were predicted to save.
        self.lacked: tuple[Shape, float] | None = None

    def fewest_rows(self, split: Split) -> int:
        """The rows of each replica in the smallest program that holds the live sequences."""
        return self._smallest(split, self.table.fullest, self._reached(0, 0)).rows

    def rows_below(self, split: Split, running: Shape | None) -> int:
        """The row bucket to which those that are left are compacted next, 0 where there is none."""
        rows = self.table.rows_per_group
        if self.by_need is None:
            return self.shapes.buckets.rows_below(split, rows)
        length = running.length if running else self.next(split, 0)[0].length
        return self.by_need.rows_below(split, rows, length)

    def next(self, split: Split, budget: int, tokens_before: int = 0) -> tuple[Shape, int]:
        """Shape and most steps of a burst, behind one of up to `tokens_before` tokens."""
        table, pace = self.table, self.shapes.pace(budget)
        context, rows = table.max_context + tokens_before, table.rows_per_group
        shape = self._smallest(split, rows, self._reached(budget, tokens_before), budget, rows)
        steps = pace.burst_steps
        if shape.length < self._last_context:
            steps = min(steps, (shape.length - context) // pace.check_tokens * pace.check_every)
        return shape, steps

    def has_drafts(self, split: Split, plan: Plan) -> bool:
        """Whether there is a program for the plan's drafts."""
        if self.by_need is None or plan.predicted is None:
            return True
        shape, steps = self.next(split, plan.budget)
        if self.by_need.has(shape):
            return True
        self.lacked = shape, max(0.0, plan.predicted.saved_s(steps))
        return False

    def charge(self, split: Split, ran: Ran) -> None:
        """Counts what a burst has lost to programs that are not compiled, if its time goes with its rows."""
        if self.by_need is None:
            return
        rows = self.shapes.buckets.rows_for(split, self.table.fullest)
        if self.table.has_work and ran.split == split and rows < ran.rows:
            fitting = Shape(ran.split, rows, ran.length)
            self.by_need.charge(fitting, ran.seconds * (1 - rows / ran.rows))
        if self.lacked is not None:
            self.by_need.charge(*self.lacked)

    def _smallest(
        self, split: Split, rows: int, length: int, budget: int = 0, most_rows: int = 2**31
    ) -> Shape:
        """That holds so many rows of so many tokens; among compiled ones if there are any."""
        buckets = self.shapes.buckets
        fitting = Shape(split, buckets.rows_for(split, rows), buckets.length_for(length), budget)
        return fitting if self.by_need is None else self.by_need.instead_of(fitting, most_rows)

    def _reached(self, budget: int, tokens_before: int) -> int:
        """Tokens that a row may hold by the first test of a burst behind one of `tokens_before` tokens."""
        context = self.table.max_context + tokens_before
        return min(self._last_context, context + self.shapes.pace(budget).check_tokens)

    @property
    def _last_context(self) -> int:
        """Tokens of the longest live sequence with its budget used up."""
        return int(self.table.end[self.table.live].max()) - 1
