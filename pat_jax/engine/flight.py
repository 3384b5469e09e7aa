"""One rollout in flight: the pool of pages, the rows, and the moves between layouts.

In between `bursts.py` decodes. Follows the host's accounts with device arrays. Decides nothing:
`rollout.py` says when.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.engine.bursts import Bursts
from pat_jax.engine.device.device_pool import DevicePool
from pat_jax.engine.device.migration import Traffic
from pat_jax.engine.device.program_specs import ProgramSpecs
from pat_jax.engine.device.programs import ProgramTable
from pat_jax.engine.layout.layout import Layout
from pat_jax.engine.scheduler import PrefillWork, Scheduler
from pat_jax.engine.sequences.accounts import NO_ROW
from pat_jax.engine.sequences.page_reserve import steps_with_room
from pat_jax.engine.sequences.prefill_calls import PrefillCall, prefill_calls
from pat_jax.engine.sequences.sequence_table import Request, SequenceTable
from pat_jax.engine.trace import Balanced
from pat_jax.models.policy import Params
from pat_jax.planning.types import Balance, Split

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Carried:
    """How the sequences went to another layout."""

    num_recomputed: int
    due: PrefillWork  # what is still to be computed there
    traffic: Traffic


class Flight:
    """Sequences being generated under one policy, in one layout at a time."""

    def __init__(
        self,
        specs: ProgramSpecs,
        programs: ProgramTable,
        layout: Layout,
        requests: Sequence[Request],
        expected: np.ndarray | None = None,
    ):
        """
        Args:
          expected: float[requests], tokens of the responses; see Scheduler.
        """
        self.specs, self.programs = specs, programs
        split, buckets = layout.split, specs.buckets
        rows = buckets.rows[split][-1]
        self.table = SequenceTable(requests, num_groups=split.dp, rows_per_group=rows)
        self.scheduler = Scheduler(
            self.table,
            num_pages=specs.pages[split],
            page_size=specs.page_size,
            expected=expected,
        )
        self.pool = DevicePool(specs, programs, layout)
        self.num_preempted = self.prefill_tokens = 0
        self.prefill_slots = 0  # tokens that the calls had room for
        self.bursts = Bursts(specs, programs, self.table, self.scheduler, self.pool)

    @property
    def layout(self) -> Layout:
        return self.pool.layout

    @property
    def split(self) -> Split:
        return self.layout.split

    @property
    def num_rows(self) -> int:
        """The row bucket: rows of one data-parallel group."""
        return self.table.rows_per_group

    @property
    def _burst_steps(self) -> int:
        return self.specs.functions.burst_steps

    @property
    def _check_every(self) -> int:
        return self.specs.functions.check_every

    def admit(self, params: Params) -> None:
        """Pages for the next few steps, and waiting sequences into free rows, prefilled."""
        self._grow()
        if len(self.table.waiting):
            most_rows = self.specs.buckets.rows[self.split][-1]
            steps, at_once = self._burst_steps, self._check_every
            due = self.scheduler.admit(most_rows, steps, at_once=at_once)
            self.bursts.rows_changed()
            self.compute(params, due)

    def _grow(self) -> None:
        room = steps_with_room(self._burst_steps, self._check_every)
        if count := self.scheduler.grow(room, at_once=self._check_every):
            self.num_preempted += count
            self.bursts.rows_changed()

    def fit(self) -> None:
        """Pages for the next few steps, and the smallest row bucket that holds the live sequences."""
        self._grow()
        table, buckets = self.table, self.specs.buckets
        rows = buckets.rows_for(self.split, table.fullest)
        if rows != self.num_rows:
            table.compact(rows)
            self.bursts.rows_changed()

    def end(self, has_enough: Callable[[int, np.ndarray], bool]) -> None:
        """Ends the live sequences of which `has_enough`, given what they have said, says so."""
        table = self.table
        ended = [i for i in table.live if has_enough(int(i), table.response(i))]
        if ended:
            table.end_now(np.array(ended))
            self.pool.copy(self.scheduler.release_ended())
            self.bursts.rows_changed()

    def carry(self, target: Layout, recompute_below: int) -> Carried:
        """Moves the live sequences to `target`; only dispatched, `compute` waits for it.

        Those with fewer than `recompute_below` tokens in the cache leave them behind: `compute` must
        follow, when the weights are there. The others migrate.
        """
        table, live, split = self.table, self.table.live, target.split
        is_recomputed = table.length[live] - 1 < recompute_below
        copies, shipments, due = self.scheduler.carry(
            split.dp,
            num_pages=self.specs.pages[split],
            is_recomputed=is_recomputed,
            steps=self._check_every,
        )
        self.pool.copy(copies)
        self.bursts.rows_changed()
        traffic = self.pool.migrate(target, shipments)
        # A sequence that found no pages is recomputed as well, now or when there are some.
        has_no_row = table.row[live] == NO_ROW
        anew = is_recomputed | has_no_row | np.isin(live, due.spans.sequence)
        return Carried(int(anew.sum()), due, traffic)

    def balance_options(self) -> list[np.ndarray]:
        """Groups in which the live sequences could be; see `balance.options`.

        What is laid out for bursts on their way is free again before any of them move.
        """
        buckets = self.specs.buckets.rows[self.split]
        return self.scheduler.balance_options(buckets, self.bursts.laid_out)

    def balance(self, plan: Balance) -> Balanced:
        """Moves live sequences to the groups that `plan` gives them, and waits for their pages."""
        start, table = time.perf_counter(), self.table
        live, fullest = table.live, table.fullest
        group = table.group(live)
        moves = self.scheduler.balance(plan.group)
        self.bursts.rows_changed()
        traffic = self.pool.shift(moves)
        self.pool.settle()
        seconds = time.perf_counter() - start
        log.info("balance: %s; took %.3f s", plan.reason, seconds)
        return Balanced(
            step=table.num_steps,
            layout=str(self.layout),
            sequences=int((table.group(live) != group).sum()),
            pages=len(moves.old_page),
            fullest=(fullest, table.fullest),
            seconds=seconds,
            predicted_saving_s=plan.predicted_saving_s,
            predicted_cost_s=plan.predicted_cost_s,
            bytes_moved=traffic.num_bytes,
            least_bytes=traffic.least_bytes,
        )

    def compute(self, params: Params, due: PrefillWork) -> None:
        """Pages of known tokens.

        The newest token of a sequence is left to the first decode step, so no logits are needed.
        """
        specs = self.specs
        for call in prefill_calls(
            due.spans,
            num_groups=self.split.dp,
            sizes=specs.prefill_sizes,
            page_size=specs.page_size,
        ):
            self._prefill(params, call)
            self.prefill_slots += call.length.size * self.specs.page_size
        self.prefill_tokens += int((due.spans.stop - due.spans.start).sum())
        self.pool.copy(due.copies)
        self.pool.settle()

    def _prefill(self, params: Params, call: PrefillCall) -> None:
        specs, size = self.specs, self.specs.page_size
        length = specs.buckets.length_for(call.context)
        sequence, start = call.sequence.reshape(-1), call.start.reshape(-1)
        tokens = np.zeros((len(sequence), size), np.int32)
        for block, (i, at, count) in enumerate(
            zip(sequence, start, call.length.reshape(-1), strict=True)
        ):
            tokens[block, :count] = self.table.tokens[i, at : at + count]
        tables = self.scheduler.block_tables(sequence, specs.width(length))
        self.pool.prefill(params, tokens, start, tables, length)

    def release(self) -> None:
        """Frees the pool: the update that follows needs the memory."""
        self.pool.delete()
