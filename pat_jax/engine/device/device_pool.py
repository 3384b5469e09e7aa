"""The pages of the KV cache on the devices, and the programs that copy and move them.

The cache manager on the host decides which pages are copied and moved.
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
    """The pools of all replicas of a layout. Methods dispatch programs; `settle` waits for them."""

    def __init__(self, specs: ProgramSpecs, programs: ProgramTable, layout: Layout):
        self.specs = specs
        self.programs = programs
        self.layout = layout
        self.pages: Pool = programs[Key("allocate", layout.split)]()

    def copy(self, copies: Copies) -> None:
        """Copies each source page to its target page in the same replica."""
        split = self.layout.split
        program = self.programs[Key("copy_pages", split)]
        queues = [np.flatnonzero(copies.replica == g) for g in range(split.dp)]
        for begin in range(0, max(map(len, queues)), COPIES):
            pairs = np.full((2, split.dp, COPIES), NULL_PAGE, np.int32)
            for g, queue in enumerate(queues):
                now = queue[begin : begin + COPIES]
                pairs[:, g, : len(now)] = copies.source[now], copies.target[now]
            sources, targets = pairs.reshape(2, -1)
            self.pages = program(self.pages, sources, targets)

    def migrate(self, target: Layout, shipments: Sequence[Shipment]) -> MovedBytes:
        """Moves pages to the replicas of another layout; pages not in `shipments` are lost."""
        source = self.layout
        self.layout = target
        self.pages = self.programs[Key("view", source.split, target=target.split)](self.pages)
        migration = Migration(self.programs, source, target)
        self.pages, sent = migration.run(self.pages, shipments)
        return sent

    def shift(self, moves: PageMoves) -> MovedBytes:
        """Moves pages to other replicas of the same layout."""
        self.pages, sent = shifted(self.programs, self.layout, self.pages, moves)
        return sent

    def settle(self) -> None:
        """Waits until all dispatched copies and moves are done."""
        jax.block_until_ready(self.pages)

    def delete(self) -> None:
        """Frees the memory once dispatched programs are done with it.

        Arrays donated to a call that was interrupted are deleted already.
        """
        for leaf in jax.tree.leaves(self.pages):
            if not leaf.is_deleted():
                jax.block_until_ready(leaf)
                leaf.delete()
