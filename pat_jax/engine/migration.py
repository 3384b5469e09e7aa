"""Carries the KV cache of running sequences from one layout to another, live pages only.

Knows the programs and in which order they run. Which sequences go where is the scheduler's to say.
"""

from dataclasses import dataclass

import jax
import numpy as np

from pat_jax.engine.catalogue import Catalogue
from pat_jax.engine.layout import Layout
from pat_jax.engine.pages import Buffer, Exchange
from pat_jax.engine.programs import Key, ProgramTable
from pat_jax.engine.rounds import ALL, Moves, Shipment, shipments
from pat_jax.models.kv_cache import KVCache


@dataclass(frozen=True)
class Traffic:
    """What a migration sent between devices, and what it had to."""

    num_bytes: int = 0  # empty pages included
    least_bytes: int = 0  # of the live pages
    num_rounds: int = 0
    staging_bytes: int = 0  # of one device, at most, besides the two caches


class Migration:
    """Between two layouts, for caches of any row bucket and of one length."""

    def __init__(
        self, catalogue: Catalogue, programs: ProgramTable, source: Layout, target: Layout
    ):
        self.catalogue, self.programs = catalogue, programs
        self.source, self.target = source.split, target.split
        self.exchange = Exchange.between(source, target)
        self.members = self.exchange.members
        # XLA's CPU devices share one pool of threads and start programs in any order: with two in
        # flight that communicate, each device may wait in another one, for ever.
        self.waits = source.mesh.devices.flat[0].platform == "cpu"

    def run(self, old: KVCache, new: KVCache, moves: Moves) -> tuple[KVCache, Traffic]:
        """Copies the pages of `moves` from `old` into `new`, which is consumed.

        Only dispatched, except on CPU: the caller waits for the cache that it gets back.
        """
        num_groups = self.exchange.narrow.split.dp
        old_rows, new_rows = (
            cache[0].keys.shape[0] // split.dp
            for cache, split in ((old, self.source), (new, self.target))
        )
        length, sent, count, largest = old[0].keys.shape[2], 0, 0, 0
        for shipment in shipments(moves, num_groups):
            new = self._ship(shipment, old, new, (old_rows, new_rows, length))
            sent += shipment.round.slots(num_groups)
            count += 1
            largest = max(largest, shipment.round.size)
        part = self._part_bytes(old)
        # A narrow buffer, and as many wide ones as there are members, packed and concatenated.
        buffers = self.exchange.num_heads + 2 * self.members.shape[1]
        due = int(moves.num_pages.sum())
        sent, due = (part * self.exchange.copies_sent * pages for pages in (sent, due))
        return new, Traffic(sent, due, count, part * buffers * largest)

    def _ship(
        self, shipment: Shipment, old: KVCache, new: KVCache, shape: tuple[int, int, int]
    ) -> KVCache:
        old_rows, new_rows, length = shape
        size, group = shipment.round.size, shipment.round.group
        pack = self.programs[Key("pack", self.source, old_rows, length, to_rows=size)]
        unpack = self.programs[Key("unpack", self.target, new_rows, length, to_rows=size)]
        part = 0 if group == ALL else 1 + group
        exchange = self.programs[Key("exchange", self.source, size, target=self.target, part=part)]
        narrow = [(shipment.narrow_row, shipment.page)]
        wide = self._wide_slots(shipment)
        leaving, arriving = (narrow, wide) if self.exchange.is_up else (wide, narrow)
        # An empty slot sends what happens to be in page 0 of row 0, and arrives nowhere.
        buffers: tuple[Buffer, ...] = tuple(
            pack(old, _flat(np.where(page < 0, 0, row)), _flat(np.maximum(page, 0)))
            for row, page in leaving
        )
        arrived = exchange(buffers)
        if self.waits:
            jax.block_until_ready(arrived)
        for buffer, (row, page) in zip(arrived, arriving, strict=True):
            rows = _flat(np.where(page < 0, new_rows, row))
            new = unpack(new, buffer, rows, _flat(np.maximum(page, 0)))
        return new

    def _wide_slots(self, shipment: Shipment) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows and pages by wide group, int[wide groups, size], one pair for each buffer."""
        row, page, group = shipment.wide_row, shipment.page, shipment.round.group
        if group == ALL:
            return [(row[groups], page[groups]) for groups in self.members.T]
        home = (self.members == group).any(axis=1)[:, None]
        return [(np.where(home, row[group], 0), np.where(home, page[group], -1))]

    def _part_bytes(self, cache: KVCache) -> int:
        """Of what one wide device holds of a page."""
        columns = self.catalogue.page_columns
        heads_each = cache[0].keys.shape[1] // self.exchange.wide.size(self.exchange.wide.kv_axes)
        return sum(
            heads_each * columns * x.shape[3] * x.dtype.itemsize for x in jax.tree.leaves(cache)
        )


def _flat(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int32).reshape(-1)
