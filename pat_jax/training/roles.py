"""The models of a run: each is trained, or frozen and read by others."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from pat_jax.common.devices import Device
from pat_jax.common.pytree import on_devices
from pat_jax.common.timeline import stage
from pat_jax.planning import stage_names
from pat_jax.programs.programs import ProgramTable
from pat_jax.rl.algorithm.losses import LOGPROBS, VALUES
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.packing import Shape
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.training.reader import Reader
from pat_jax.training.trainer import CRITIC, OLD, Trainer

REFERENCE, TEACHER = "reference", "teacher"
States = Mapping[str, TrainState]  # by the name of the trained role


@dataclass(frozen=True)
class Prediction:
    """What one role predicts of responses before an update."""

    column: str
    devices: frozenset[Device]
    is_column: bool  # False: the likeliest tokens of a teacher
    read: Callable[[TrainBatch], TrainBatch]

    def added_to(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with the predictions, computed. Does nothing if they are all there."""
        every = [x.columns for mini in batch.mini_batches for x in mini]
        if self.is_column and all(self.column in columns for columns in every):
            return batch
        with stage(self.name, self.devices):
            batch = self.read(batch)
            columns = [x.columns for mini in batch.mini_batches for x in mini]
            jax.block_until_ready(columns)
        return batch

    @property
    def name(self) -> str:
        """The stage's name."""
        known = {
            OLD[LOGPROBS]: (stage_names.LOGPROBS, "policy"),
            OLD[VALUES]: (stage_names.VALUES, CRITIC),
        }
        role = self.column.partition("_")[0]
        what, of = known.get(self.column, (stage_names.LOGPROBS, role))
        return stage_names.predictions(what, of)


@dataclass(frozen=True)
class Roles:
    """The handles of a run's models."""

    policy: Trainer
    readers: Mapping[str, Reader] = field(default_factory=dict)  # by the name of the role
    critic: Trainer | None = None
    others: Sequence[Any] = ()  # shapes with shardings of what else stays on the devices
    micro_shapes: Sequence[Shape] = ()  # rows and length of an iteration's micro-batches
    are_apart: bool = False  # whether the roles that read a batch have different devices

    def resident_on(self, devices: Iterable[Device]) -> list[Any]:
        """Returns shapes with shardings of what stays on these devices during a rollout."""
        kept = (role.kept for role in self.trained)
        read = (reader.resident for reader in self.readers.values())
        return on_devices([self.others, *kept, *read], devices)

    @property
    def trained(self) -> list[Trainer]:
        """The trained roles, in the order in which an iteration updates them."""
        return [*([self.critic] if self.critic else []), self.policy]

    @property
    def abstract_states(self) -> dict[str, Any]:
        """Shapes with shardings of the states of all trained roles, by name."""
        return {role.name: role.abstract_state for role in self.trained}

    @property
    def tables(self) -> Iterator[ProgramTable]:
        """The programs of each role."""
        yield from (role.programs for role in self.trained)
        yield from (reader.programs for reader in self.readers.values())

    @property
    def waited_s(self) -> float:
        """Seconds that the run waited for programs compiled at first use."""
        return sum(table.waited_s for table in self.tables)

    def to_compile(self, *, by_need: bool) -> int:
        """Returns how many programs `compile` would compile."""
        of_readers = (len(x.to_compile(by_need=by_need)) for x in self.readers.values())
        return sum(x.to_compile(by_need=by_need) for x in self.trained) + sum(of_readers)

    def compile(
        self, progress: Callable[[int, int], None] | None = None, *, by_need: bool = False
    ) -> None:
        """Compiles the programs of all roles.

        Args:
          by_need: compile only the passes of the largest micro-batch now, others at first use.
        """
        for role in self.trained[::-1]:
            role.compile(progress, by_need=by_need)
        for reader in self.readers.values():
            reader.compile(by_need=by_need)

    def read(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with the columns of all readers."""
        for reader in self.readers.values():
            batch = reader.read(batch)
        return batch

    def predictions(self, states: Callable[[], States]) -> Iterator[Prediction]:
        """Yields what is predicted before an update: by readers, and by the trained roles whose
        predictions are asked for.

        Args:
          states: returns the states of the trained roles when something is predicted.
        """
        for reader in self.readers.values():
            yield Prediction(reader.column, reader.devices, not reader.top_k, reader.read)
        for role in self.trained:
            if role.predicts:
                read = partial(_predict, role, states)
                yield Prediction(role.old, role.layout.devices, True, read)

    def predict(self, states: States, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with the columns of all predictions that are made before an update."""
        for one in self.predictions(lambda: states):
            batch = one.added_to(batch)
        return batch.on_host() if self.are_apart else batch


def _predict(role: Trainer, states: Callable[[], States], batch: TrainBatch) -> TrainBatch:
    return role.predict(states()[role.name], batch)
