"""The pages of the KV cache on the devices, and the programs that move them.

The host's cache manager says which pages.
"""

from collections.abc import Sequence

import jax
import numpy as np

from pat_jax.engine.device.pages.migration import Migration, shifted
from pat_jax.engine.device.programs.program_specs import COPIES, ProgramSpecs
from pat_jax.engine.relocation.rounds import Shipment
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.prefill_calls import Copies, MovedBytes, PageMoves
from pat_jax.engine.sequences.state import Pool
from pat_jax.layout.layout import Layout
from pat_jax.programs.programs import Key, ProgramTable


class DevicePool:
    """In one layout at a time. Everything is only dispatched; `settle` waits."""

    def __init__(self, specs: ProgramSpecs, programs: ProgramTable, layout: Layout):
        self.specs, self.programs, self.layout = specs, programs, layout
        self.pages: Pool = programs[Key("allocate", layout.split)]()

    def copy(self, copies: Copies) -> None:
        """Pages to others of their replica."""
        split = self.layout.split
        program = self.programs[Key("copy_pages", split)]
        queues = [np.flatnonzero(copies.replica == g) for g in range(split.dp)]
        for begin in range(0, max(map(len, queues)), COPIES):
            pairs = np.full((2, split.dp, COPIES), NULL_PAGE, np.int32)
            for g, queue in enumerate(queues):
                now = queue[begin : begin + COPIES]
                pairs[:, g, : len(now)] = copies.source[now], copies.target[now]
            self.pages = program(self.pages, *pairs.reshape(2, -1))

    def migrate(self, target: Layout, shipments: Sequence[Shipment]) -> MovedBytes:
        """To the replicas of another layout; what is not among the shipments is lost."""
        source, self.layout = self.layout, target
        self.pages = self.programs[Key("view", source.split, target=target.split)](self.pages)
        migration = Migration(self.programs, source, target)
        self.pages, sent = migration.run(self.pages, shipments)
        return sent

    def shift(self, moves: PageMoves) -> MovedBytes:
        """To other replicas of the same layout."""
        self.pages, sent = shifted(self.programs, self.layout, self.pages, moves)
        return sent

    def settle(self) -> None:
        """Waits until the pages are there."""
        jax.block_until_ready(self.pages)

    def delete(self) -> None:
        """Frees the memory, when what has been dispatched is done with it.

        Where a rollout was interrupted in the middle of a call, it has given its arrays up already.
        """
        for leaf in jax.tree.leaves(self.pages):
            if not leaf.is_deleted():
                jax.block_until_ready(leaf)
                leaf.delete()
