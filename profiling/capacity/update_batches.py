"""Packs an iteration's micro-batches from the replayed lengths, with the trainer's own code."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.profiling.simulate.machine import Workload
from pat_jax.rl.batches.packing import Prefix, Shape, pack_rows


@dataclass(frozen=True)
class Packed:
    """One iteration's micro-batches."""

    shapes: tuple[Shape, ...]
    # For each micro-batch, the number of pairs of query and key on the device that has most.
    pairs: tuple[float, ...]
    # For each response, the tokens of its prompt that it shares with another one.
    shared: tuple[int, ...]

    @classmethod
    def of(
        cls,
        workload: Workload,
        mini_batch: int,
        micro_shapes: Sequence[Shape],
        dp: int,
        *,
        shares_prompts: bool = False,
    ) -> "Packed":
        """Returns the micro-batches of the responses of one iteration.

        Args:
          mini_batch: responses of whole groups in one optimizer step.
          micro_shapes: shapes of micro-batches, see `rl.batches.packing.shapes`.
          dp: number of devices that the rows of a micro-batch are split over.
          shares_prompts: whether responses to one prompt may share it.
        """
        lengths = (workload.prompts + workload.responses).tolist()
        prefixes = _prefixes(workload) if shares_prompts else None
        shapes, pairs, shared = [], [], []
        for i in range(0, len(lengths), mini_batch):
            chosen = slice(i, i + mini_batch)
            mini = lengths[chosen]
            packing = pack_rows(mini, micro_shapes, prefixes and prefixes[chosen])
            of_device = np.zeros((len(packing.shapes), dp))
            for length, spot in zip(mini, packing.spots, strict=True):
                device = spot.row * dp // packing.shapes[spot.micro][0]
                seen = length * (length + 1) - spot.shared * (spot.shared + 1)
                of_device[spot.micro, device] += seen / 2
            shared += [spot.shared for spot in packing.spots]
            shapes += packing.shapes
            pairs += of_device.max(axis=1).tolist()
        return cls(tuple(shapes), tuple(pairs), tuple(shared))

    @property
    def slots(self) -> int:
        """Tokens of all micro-batches, padding included."""
        return sum(rows * length for rows, length in self.shapes)


def _prefixes(workload: Workload) -> list[Prefix] | None:
    """Returns each response's prefix, as `rl.batches.batches.prompt_prefixes`, or None."""
    if workload.prompt_id is None:
        return None
    both = zip(workload.prompt_id.tolist(), workload.prompts.tolist(), strict=True)
    return [Prefix(prompt, length - 1) for prompt, length in both]
