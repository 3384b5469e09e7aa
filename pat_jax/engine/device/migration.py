"""Carries the KV cache of running sequences to another layout, or another group: live pages only.

Knows the programs and in which order they run. The scheduler says which sequences
go where, `relocation/order.py` which pages go together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from pat_jax.engine.device.pages import Buffer, Exchange, elsewhere, part_bytes
from pat_jax.engine.device.programs import Key, ProgramTable
from pat_jax.engine.layout.layout import Layout
from pat_jax.engine.relocation.rounds import ALL, Shift, Shipment, arriving, shifts
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import PageMoves
from pat_jax.engine.sequences.state import Pool


@dataclass(frozen=True)
class Traffic:
    """What a migration sent between devices, and what it had to."""

    num_bytes: int = 0  # empty pages included
    least_bytes: int = 0  # of the live pages
    num_rounds: int = 0
    staging_bytes: int = 0  # of one device, at most, besides the pool

    def before(self, other: "Traffic") -> "Traffic":
        """Of both, one after the other."""
        return Traffic(
            self.num_bytes + other.num_bytes,
            self.least_bytes + other.least_bytes,
            self.num_rounds + other.num_rounds,
            max(self.staging_bytes, other.staging_bytes),
        )


class Migration:
    """Between two layouts."""

    def __init__(self, programs: ProgramTable, source: Layout, target: Layout):
        self.programs = programs
        self.source, self.target = source.split, target.split
        self.exchange = Exchange.between(source, target)
        self.members = self.exchange.members
        self.waits = source.backend.waits

    def run(self, pool: Pool, shipments: Sequence[Shipment]) -> tuple[Pool, Traffic]:
        """Copies pages to where they belong in the target.

        Only dispatched, except on CPU: the caller waits for the pool that it gets back.

        Args:
          pool: as the target sees the memory of the source's (`pages.view`); consumed. No page that
            arrives lies in the memory of one that has not been packed when it is unpacked.
        """
        num_groups, exchange = self.exchange.narrow.split.dp, self.exchange
        sent, due, count, most_parts = 0, 0, 0, 0
        waiting: dict[int, tuple[Buffer, ...]] = {}
        for number, shipment in enumerate(shipments):
            size, earlier = shipment.round.size, (shipments[k].round for k in waiting)
            held = sum(step.size * exchange.arrived(step) for step in earlier)
            most_parts = max(most_parts, held + size * exchange.staged)
            waiting[number] = self._send(shipment, pool)
            for other in shipment.put:
                pool = self._put(shipments[other], waiting.pop(other), pool)
            sent += shipment.round.slots(num_groups)
            due += int((shipment.old_page != NULL_PAGE).sum())
            count += 1
        part = exchange.part_bytes(pool)
        sent, due = (part * exchange.copies_sent * pages for pages in (sent, due))
        return pool, Traffic(sent, due, count, part * most_parts)

    def _send(self, shipment: Shipment, pool: Pool) -> tuple[Buffer, ...]:
        size, group = shipment.round.size, shipment.round.group
        pack = self.programs[Key("pack", self.source, size, target=self.target)]
        pages = self._by_buffer(shipment, shipment.old_page, is_wide=not self.exchange.is_up)
        # An empty slot sends what happens to be in the null page, and arrives nowhere.
        packed = tuple(pack(pool, _flat(one)) for one in pages)
        name = "exchange" if group == ALL else "exchange_one"
        exchange = self.programs[Key(name, self.source, size, target=self.target)]
        arrived = exchange(packed) if group == ALL else exchange(np.int32(group), packed)
        if self.waits:
            jax.block_until_ready(arrived)
        return arrived

    def _put(self, shipment: Shipment, arrived: tuple[Buffer, ...], pool: Pool) -> Pool:
        unpack = self.programs[Key("unpack", self.target, shipment.round.size)]
        pages = self._by_buffer(shipment, shipment.new_page, is_wide=self.exchange.is_up)
        for buffer, one in zip(arrived, pages, strict=True):
            pool = unpack(pool, buffer, _flat(one))
        return pool

    def _by_buffer(
        self, shipment: Shipment, pages: np.ndarray, *, is_wide: bool
    ) -> list[np.ndarray]:
        """Pages of each buffer, int[groups, size], by the groups of the layout that has them."""
        group = shipment.round.group
        if not is_wide:
            return [pages]
        if group == ALL:
            return [pages[groups] for groups in self.members.T]
        home = (self.members == group).any(axis=1)[:, None]
        return [np.where(home, pages[group], NULL_PAGE)]


class Sent(NamedTuple):
    """Copies of pages that are in other groups, or on their way."""

    shift: Shift
    arrived: Buffer


class Shifting:
    """Between the groups of a layout."""

    def __init__(self, programs: ProgramTable, layout: Layout):
        self.programs, self.layout, self.waits = programs, layout, layout.backend.waits

    def run(self, pool: Pool, moves: PageMoves) -> tuple[Pool, Traffic]:
        """Copies the pages of `moves` to their new groups.

        Only dispatched, except on CPU, like a migration.

        Args:
          pool: consumed. No page that arrives lies in one that leaves.
        """
        split, sent, count, largest = self.layout.split, 0, 0, 0
        for shift in shifts(moves, split.dp):
            pool = self.unpack(pool, self._ship(shift, pool), shift.new_page)
            sent += shift.old_page.size
            count += 1
            largest = max(largest, shift.old_page.shape[1])
        return pool, self._traffic(pool, moves, sent, count, largest)

    def put(self, pool: Pool, moves: PageMoves, sent: list[Sent]) -> tuple[Pool, Traffic]:
        """Unpacks copies that `send` has sent, as far as `moves` say where they belong.

        Args:
          pool: consumed, as in `run`.
          sent: consumed as well: each makes room for what follows.
        """
        sizes = [one.shift.old_page.shape for one in sent]
        while sent:
            one = sent.pop()
            pool = self.unpack(pool, one.arrived, arriving(one.shift, moves))
        slots = sum(groups * size for groups, size in sizes)
        return pool, self._traffic(pool, moves, slots, len(sizes), sum(n for _, n in sizes))

    def _traffic(
        self, pool: Pool, moves: PageMoves, slots: int, rounds: int, staged: int
    ) -> Traffic:
        """
        Args:
          slots: pages of all groups that were sent, empty ones included.
          staged: pages of a group that were packed at once.
        """
        part, tp = part_bytes(self.layout, pool), self.layout.split.tp
        sent, due = (part * tp * pages for pages in (slots, len(moves.old_page)))
        return Traffic(sent, due, rounds, 2 * part * staged)

    def send(self, pool: Pool, shifts: Sequence[Shift]) -> list[Sent]:
        """Copies pages to other groups, into buffers, while other programs run.

        Args:
          pool: may be consumed by what is dispatched next.
        """
        packed = [self.pack(pool, shift) for shift in shifts]
        # Their time is not that of the burst that follows.
        jax.block_until_ready(packed)
        return [
            Sent(shift, elsewhere(self.layout, buffer, shift.distance))
            for shift, buffer in zip(shifts, packed, strict=True)
        ]

    def pack(self, pool: Pool, shift: Shift) -> Buffer:
        """Copies of pages, in one piece for each group."""
        split, size = self.layout.split, shift.old_page.shape[1]
        return self.programs[Key("pack", split, size, target=split)](pool, _flat(shift.old_page))

    def _ship(self, shift: Shift, pool: Pool) -> Buffer:
        packed, size = self.pack(pool, shift), shift.old_page.shape[1]
        program = self.programs[Key("shift", self.layout.split, size)]
        arrived = program(np.int32(shift.distance), packed)
        if self.waits:
            jax.block_until_ready(arrived)
        return arrived

    def unpack(self, pool: Pool, arrived: Buffer, new_page: np.ndarray) -> Pool:
        """Copies that have arrived to their pages, int[groups, size]; NULL_PAGE: to none."""
        program = self.programs[Key("unpack", self.layout.split, new_page.shape[1])]
        return program(pool, arrived, _flat(new_page))


def _flat(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int32).reshape(-1)
