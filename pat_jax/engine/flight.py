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
from pat_jax.engine.device.program_specs import Catalogue
from pat_jax.engine.device.programs import ProgramTable
from pat_jax.engine.layout.layout import Layout
from pat_jax.engine.scheduler import Admission, Round
from pat_jax.engine.sequences.accounts import NO_ROW
from pat_jax.engine.sequences.page_reserve import steps_with_room
from pat_jax.engine.sequences.prefill_calls import PrefillCall, prefill_calls
from pat_jax.engine.sequences.sequence_table import Request, Scheduler
from pat_jax.engine.trace import Balanced
from pat_jax.models.policy import Params
from pat_jax.planning.types import Balance, Split

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Carried:
    """How the sequences went to another layout."""

    num_recomputed: int
    due: Round  # what is still to be computed there
    traffic: Traffic


class Flight:
    """Sequences being generated under one policy, in one layout at a time."""

    def __init__(
        self,
        catalogue: Catalogue,
        programs: ProgramTable,
        layout: Layout,
        requests: Sequence[Request],
        expected: np.ndarray | None = None,
    ):
        """
        Args:
          expected: float[requests], tokens of the responses; see Admission.
        """
        self.catalogue, self.programs = catalogue, programs
        split, buckets = layout.split, catalogue.buckets
        rows = buckets.rows[split][-1]
        self.scheduler = Scheduler(requests, num_groups=split.dp, rows_per_group=rows)
        self.admission = Admission(
            self.scheduler,
            num_pages=catalogue.pages[split],
            page_size=catalogue.page_size,
            expected=expected,
        )
        self.pool = DevicePool(catalogue, programs, layout)
        self.num_preempted = self.prefill_tokens = 0
        self.prefill_slots = 0  # tokens that the calls had room for
        self.bursts = Bursts(catalogue, programs, self.scheduler, self.admission, self.pool)

    @property
    def layout(self) -> Layout:
        return self.pool.layout

    @property
    def split(self) -> Split:
        return self.layout.split

    @property
    def num_rows(self) -> int:
        """The row bucket: rows of one data-parallel group."""
        return self.scheduler.rows_per_group

    @property
    def _burst_steps(self) -> int:
        return self.catalogue.functions.burst_steps

    @property
    def _check_every(self) -> int:
        return self.catalogue.functions.check_every

    def admit(self, params: Params) -> None:
        """Pages for the next few steps, and waiting sequences into free rows, prefilled."""
        self._grow()
        if len(self.scheduler.waiting):
            most_rows = self.catalogue.buckets.rows[self.split][-1]
            steps, at_once = self._burst_steps, self._check_every
            due = self.admission.admit(most_rows, steps, at_once=at_once)
            self.bursts.rows_changed()
            self.compute(params, due)

    def _grow(self) -> None:
        room = steps_with_room(self._burst_steps, self._check_every)
        if count := self.admission.grow(room, at_once=self._check_every):
            self.num_preempted += count
            self.bursts.rows_changed()

    def fit(self) -> None:
        """Pages for the next few steps, and the smallest row bucket that holds the live sequences."""
        self._grow()
        scheduler, buckets = self.scheduler, self.catalogue.buckets
        rows = buckets.rows_for(self.split, scheduler.fullest)
        if rows != self.num_rows:
            scheduler.compact(rows)
            self.bursts.rows_changed()

    def end(self, has_enough: Callable[[int, np.ndarray], bool]) -> None:
        """Ends the live sequences of which `has_enough`, given what they have said, says so."""
        scheduler = self.scheduler
        ended = [i for i in scheduler.live if has_enough(int(i), scheduler.response(i))]
        if ended:
            scheduler.end_now(np.array(ended))
            self.pool.copy(self.admission.release_ended())
            self.bursts.rows_changed()

    def carry(self, target: Layout, recompute_below: int) -> Carried:
        """Moves the live sequences to `target`; only dispatched, `compute` waits for it.

        Those with fewer than `recompute_below` tokens in the cache leave them behind: `compute` must
        follow, when the weights are there. The others migrate.
        """
        scheduler, live, split = self.scheduler, self.scheduler.live, target.split
        is_recomputed = scheduler.length[live] - 1 < recompute_below
        copies, shipments, due = self.admission.carry(
            split.dp,
            num_pages=self.catalogue.pages[split],
            is_recomputed=is_recomputed,
            steps=self._check_every,
        )
        self.pool.copy(copies)
        self.bursts.rows_changed()
        traffic = self.pool.migrate(target, shipments)
        # Who found no pages is recomputed as well, now or when there are some.
        has_no_row = scheduler.row[live] == NO_ROW
        anew = is_recomputed | has_no_row | np.isin(live, due.spans.sequence)
        return Carried(int(anew.sum()), due, traffic)

    def balance_options(self) -> list[np.ndarray]:
        """Groups in which the live sequences could be; see `balance.options`.

        What is laid out for bursts on their way is free again before any of them move.
        """
        buckets = self.catalogue.buckets.rows[self.split]
        return self.admission.balance_options(buckets, self.bursts.laid_out)

    def balance(self, plan: Balance) -> Balanced:
        """Moves live sequences to the groups that `plan` gives them, and waits for their pages."""
        start, scheduler = time.perf_counter(), self.scheduler
        live, fullest = scheduler.live, scheduler.fullest
        group = scheduler.group(live)
        moves = self.admission.balance(plan.group)
        self.bursts.rows_changed()
        traffic = self.pool.shift(moves)
        self.pool.settle()
        seconds = time.perf_counter() - start
        log.info("balance: %s; took %.3f s", plan.reason, seconds)
        return Balanced(
            step=scheduler.num_steps,
            layout=str(self.layout),
            sequences=int((scheduler.group(live) != group).sum()),
            pages=len(moves.old_page),
            fullest=(fullest, scheduler.fullest),
            seconds=seconds,
            predicted_saving_s=plan.predicted_saving_s,
            predicted_cost_s=plan.predicted_cost_s,
            bytes_moved=traffic.num_bytes,
            least_bytes=traffic.least_bytes,
        )

    def compute(self, params: Params, due: Round) -> None:
        """Pages of known tokens.

        The newest token of a sequence is left to the first decode step, so no logits are needed.
        """
        catalogue = self.catalogue
        for call in prefill_calls(
            due.spans,
            num_groups=self.split.dp,
            sizes=catalogue.prefill_sizes,
            page_size=catalogue.page_size,
        ):
            self._prefill(params, call)
            self.prefill_slots += call.length.size * self.catalogue.page_size
        self.prefill_tokens += int((due.spans.stop - due.spans.start).sum())
        self.pool.copy(due.copies)
        self.pool.settle()

    def _prefill(self, params: Params, call: PrefillCall) -> None:
        catalogue, size = self.catalogue, self.catalogue.page_size
        length = catalogue.buckets.length_for(call.context)
        sequence, start = call.sequence.reshape(-1), call.start.reshape(-1)
        tokens = np.zeros((len(sequence), size), np.int32)
        for block, (i, at, count) in enumerate(
            zip(sequence, start, call.length.reshape(-1), strict=True)
        ):
            tokens[block, :count] = self.scheduler.tokens[i, at : at + count]
        tables = self.admission.table(sequence, catalogue.width(length))
        self.pool.prefill(params, tokens, start, tables, length)

    def release(self) -> None:
        """Frees the pool: the update that follows needs the memory."""
        self.pool.delete()
