"""Moves pages of running sequences to another layout or another replica.

Knows the programs and their order. The cache manager decides which sequences go where, and
`relocation/order.py` which pages go together.
"""

from collections.abc import Sequence

import jax
import numpy as np

from pat_jax.engine.device.pages.pages import Buffer, Exchange, part_bytes
from pat_jax.engine.relocation.rounds import ALL, Shipment, shifts
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import MovedBytes, PageMoves
from pat_jax.engine.sequences.state import Pool
from pat_jax.layout.layout import Layout
from pat_jax.programs.programs import Key, ProgramTable


class Migration:
    """Moves pages of the KV cache from one layout to another, in rounds."""

    def __init__(self, programs: ProgramTable, source: Layout, target: Layout):
        self.programs = programs
        self.source = source.split
        self.target = target.split
        self.exchange = Exchange.between(source, target)
        self.members = self.exchange.members
        self.waits = source.backend.waits

    def run(self, pool: Pool, shipments: Sequence[Shipment]) -> tuple[Pool, MovedBytes]:
        """Copies pages to their places in the target's pool.

        The programs are only dispatched, except on CPU; the caller waits for the returned pool.

        Args:
          pool: the source's pool viewed as the target's (`pages.view`); consumed.
          shipments: the rounds in order. New pages may overwrite only old ones packed before.

        Returns:
          The pool, and the bytes sent.
        """
        num_replicas = self.exchange.narrow.split.dp
        exchange = self.exchange
        sent = 0
        due = 0
        most_parts = 0
        waiting: dict[int, tuple[Buffer, ...]] = {}
        for number, shipment in enumerate(shipments):
            size = shipment.round.size
            earlier = (shipments[k].round for k in waiting)
            held = sum(step.size * exchange.arrived(step) for step in earlier)
            most_parts = max(most_parts, held + size * exchange.staged)
            waiting[number] = self._send(shipment, pool)
            for other in shipment.put:
                pool = self._put(shipments[other], waiting.pop(other), pool)
            sent += shipment.round.slots(num_replicas)
            due += int((shipment.old_page != NULL_PAGE).sum())
        part = part_bytes(exchange.wide, pool)
        sent, due = (part * exchange.copies_sent * pages for pages in (sent, due))
        return pool, MovedBytes(sent, due, part * most_parts)

    def _send(self, shipment: Shipment, pool: Pool) -> tuple[Buffer, ...]:
        size = shipment.round.size
        replica = shipment.round.replica
        pack = self.programs[Key("pack", self.source, size, target=self.target)]
        pages = self._by_buffer(shipment, shipment.old_page, is_wide=not self.exchange.is_up)
        # An empty slot sends the null page's content, which is dropped on arrival.
        packed = tuple(pack(pool, _flat(one)) for one in pages)
        name = "exchange" if replica == ALL else "exchange_one"
        exchange = self.programs[Key(name, self.source, size, target=self.target)]
        arrived = exchange(packed) if replica == ALL else exchange(np.int32(replica), packed)
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
        """For each buffer, the page of each of its slots in each replica, int[replicas, size]."""
        replica = shipment.round.replica
        if not is_wide:
            return [pages]
        if replica == ALL:
            return [pages[replicas] for replicas in self.members.T]
        home = (self.members == replica).any(axis=1)[:, None]
        return [np.where(home, pages[replica], NULL_PAGE)]


def shifted(
    programs: ProgramTable, layout: Layout, pool: Pool, moves: PageMoves
) -> tuple[Pool, MovedBytes]:
    """Copies the pages of `moves` to other replicas of a layout; returns the pool and bytes sent.

    The programs are only dispatched, except on CPU.

    Args:
      pool: the layout's pool; consumed.
      moves: no page may arrive where another page of `moves` has to leave.
    """
    split = layout.split
    part = part_bytes(layout, pool)
    sent = 0
    largest = 0
    for shift in shifts(moves, split.dp):
        size = shift.old_page.shape[1]
        pack = programs[Key("pack", split, size, target=split)]
        send = programs[Key("shift", split, size)]
        arrived = send(np.int32(shift.distance), pack(pool, _flat(shift.old_page)))
        if layout.backend.waits:
            jax.block_until_ready(arrived)
        pool = programs[Key("unpack", split, size)](pool, arrived, _flat(shift.new_page))
        sent = sent + shift.old_page.size
        largest = max(largest, size)
    sent, due = (part * split.tp * pages for pages in (sent, len(moves.old_page)))
    return pool, MovedBytes(sent, due, 2 * part * largest)


def _flat(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int32).reshape(-1)
