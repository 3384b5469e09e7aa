"""The base class of trained and frozen roles: a layout, and programs compiled for it."""

import os
from collections.abc import Callable, Sequence

from pat_jax.common.devices import Device
from pat_jax.layout.layout import Layout
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.rl.batches.packing import Shape


class Handle:
    """A role of a run, with programs of its own."""

    def __init__(self, layout: Layout, micro_shapes: Sequence[Shape]):
        """
        Args:
          micro_shapes: number and length of the rows of each micro-batch; empty without passes.
        """
        self.layout = layout
        self.largest = micro_shapes[-1:]
        # What a mini-batch leaves over needs a smaller shape. An accelerator's host has processors
        # to compile one beside the largest.
        self._first = self.largest if layout.platform == "cpu" else micro_shapes[-2:]
        self.programs = ProgramTable()

    @property
    def devices(self) -> frozenset[Device]:
        return self.layout.devices

    def to_compile(self, *, by_need: bool) -> int:
        """Returns the number of programs that `compile` would compile."""
        return sum(self._is_first(key) or not by_need for key in self.programs.missing())

    def compile(
        self, progress: Callable[[int, int], None] | None = None, *, by_need: bool = False
    ) -> None:
        """Compiles the programs.

        Args:
          by_need: compile only the passes of the largest micro-batch now, and on accelerators those
            of the next smaller one; others at first use.
        """
        asked = self._is_first if by_need else lambda key: True
        threads = os.cpu_count() or 1
        self.programs.compile_all(threads=threads, progress=progress, only=asked)

    def _is_first(self, key: Key) -> bool:
        return key.rows == 0 or (key.rows, key.length) in self._first
