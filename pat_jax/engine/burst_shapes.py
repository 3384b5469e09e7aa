"""Chooses the program that the next burst runs, and its number of steps.

Knows buckets and the rows of a sequence table. Does not know pages, nor why a burst ends.
"""

from typing import TYPE_CHECKING

from pat_jax.engine.sequences.sequence_table import SequenceTable
from pat_jax.layout.buckets import Shape, Shapes
from pat_jax.planning.types import BurstResult, Plan, Split

if TYPE_CHECKING:
    from pat_jax.engine.by_need import ByNeed  # knows programs: simulated rollouts have none


class BurstShapes:
    """Chooses the shapes of one rollout's bursts."""

    def __init__(self, shapes: Shapes, table: SequenceTable, by_need: "ByNeed | None"):
        """
        Args:
          by_need: chooses among the programs compiled so far; None if all programs are compiled.
        """
        self.shapes = shapes
        self.table = table
        self.by_need = by_need
        # The shape, with the plan's drafts, for which the newest burst found no compiled program,
        # and the seconds that these drafts were predicted to save in it.
        self.lacked: tuple[Shape, float] | None = None

    def fewest_rows(self, split: Split) -> int:
        """Returns the rows per replica of the smallest program that holds the running sequences."""
        return self._smallest(split, self.table.fullest, self._reached(0, 0)).rows

    def rows_below(self, split: Split, in_flight: Shape | None) -> int:
        """Returns the next smaller row bucket, which rows can be compacted to, or 0 if none."""
        rows = self.table.rows_per_replica
        if self.by_need is None:
            return self.shapes.buckets.rows_below(split, rows)
        length = in_flight.length if in_flight else self.next(split, 0)[0].length
        return self.by_need.rows_below(split, rows, self.shapes.buckets.length_for(length))

    def next(
        self, split: Split, num_draft_tokens: int, tokens_before: int = 0
    ) -> tuple[Shape, int]:
        """Returns the shape of the next burst, and the most decode steps that it may run.

        Args:
          tokens_before: the most tokens that the burst still running may add to a row.
        """
        table = self.table
        pace = self.shapes.pace(num_draft_tokens)
        context = table.max_context + tokens_before
        rows = table.rows_per_replica
        shape = self._smallest(
            split, rows, self._reached(num_draft_tokens, tokens_before), num_draft_tokens, rows
        )
        steps = pace.burst_steps
        if shape.length < self._last_context:
            steps = min(steps, (shape.length - context) // pace.check_tokens * pace.check_every)
        return shape, steps

    def length(self, shape: Shape) -> int:
        """Returns the length on which the time of the next burst to be collected depends: that of
        its `shape`, or the longest context if steps read only what rows hold."""
        is_held = self.shapes.buckets.reads == "held" and len(self.table.running) > 0
        return self.table.max_context if is_held else shape.length

    def has_drafts(self, split: Split, plan: Plan) -> bool:
        """Returns whether a program for the plan's number of draft tokens is compiled. If not, sets
        `lacked` to the program's shape and the seconds that drafts would save."""
        if self.by_need is None or plan.predicted is None:
            return True
        shape, steps = self.next(split, plan.num_draft_tokens)
        if self.by_need.has(shape):
            return True
        self.lacked = shape, max(0.0, plan.predicted.saved_s(steps))
        return False

    def charge(self, split: Split, ran: BurstResult) -> None:
        """Counts the seconds that a burst lost because a better program is not compiled. A burst's
        seconds are taken as proportional to its rows."""
        if self.by_need is None:
            return
        rows = self.shapes.buckets.rows_for(split, self.table.fullest)
        if self.table.has_work and ran.split == split and rows < ran.rows:
            fitting = Shape(ran.split, rows, self.shapes.buckets.length_for(ran.length))
            self.by_need.charge(fitting, ran.seconds * (1 - rows / ran.rows))
        if self.lacked is not None:
            shape, saved_s = self.lacked
            self.by_need.charge(shape, saved_s)

    def _smallest(
        self,
        split: Split,
        rows: int,
        length: int,
        num_draft_tokens: int = 0,
        most_rows: int = 2**31,
    ) -> Shape:
        """The smallest shape that holds `rows` rows of `length` tokens, compiled if possible."""
        shapes = self.shapes
        fitting = Shape(
            split,
            shapes.buckets.rows_for(split, rows),
            shapes.length_for(length, num_draft_tokens),
            num_draft_tokens,
        )
        return fitting if self.by_need is None else self.by_need.instead_of(fitting, most_rows)

    def _reached(self, num_draft_tokens: int, tokens_before: int) -> int:
        """The most cached tokens of a row when the next burst first tests whether it ends."""
        context = self.table.max_context + tokens_before
        return min(self._last_context, context + self.shapes.pace(num_draft_tokens).check_tokens)

    @property
    def _last_context(self) -> int:
        """Most cached tokens that a running sequence can reach, given its limit."""
        return int(self.table.end[self.table.running].max()) - 1
