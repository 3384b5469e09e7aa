"""The models of a run: each is trained, or frozen and read by others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.training.reader import Reader
from pat_jax.training.trainer import Trainer

REFERENCE, TEACHER = "reference", "teacher"


@dataclass(frozen=True)
class Roles:
    """The handles of a run's models."""

    policy: Trainer
    readers: Mapping[str, Reader] = field(default_factory=dict)  # by the name of the role

    def to_compile(self, *, by_need: bool) -> int:
        """Returns how many programs `compile` would compile."""
        of_readers = (len(x.to_compile(by_need=by_need)) for x in self.readers.values())
        return self.policy.to_compile(by_need=by_need) + sum(of_readers)

    def compile(
        self, progress: Callable[[int, int], None] | None = None, *, by_need: bool = False
    ) -> None:
        """Compiles the programs of all roles.

        Args:
          by_need: compile only the passes of the largest micro-batch now, others at first use.
        """
        self.policy.compile(progress, by_need=by_need)
        for reader in self.readers.values():
            reader.compile(by_need=by_need)

    def read(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with the columns of all readers."""
        for reader in self.readers.values():
            batch = reader.read(batch)
        return batch
