"""The models of a run: each is trained, or frozen with predictions that others read."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from pat_jax.common.devices import Device
from pat_jax.common.pytree import on_devices
from pat_jax.common.timeline import stage
from pat_jax.planning.stage_names import LOGPROBS, VALUES, predictions
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.packing import Shape
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.training.build import schedule_of
from pat_jax.training.handle import Handle
from pat_jax.training.reader import Reader
from pat_jax.training.role_model import RoleModel
from pat_jax.training.trainer import Trainer

States = Mapping[str, TrainState]  # by the name of the trained role


@dataclass(frozen=True)
class Prediction:
    """One role's prediction for a batch, still to be computed, before an update."""

    name: str  # name of the stage in which the role predicts
    column: str
    devices: frozenset[Device]
    is_column: bool  # False if a teacher's likeliest tokens are predicted instead
    read: Callable[[TrainBatch], TrainBatch]

    def added_to(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with the computed predictions, or unchanged if it has them already."""
        every = [x.columns for mini in batch.mini_batches for x in mini]
        if self.is_column and all(self.column in columns for columns in every):
            return batch
        with stage(self.name, self.devices):
            batch = self.read(batch)
            columns = [x.columns for mini in batch.mini_batches for x in mini]
            jax.block_until_ready(columns)
        return batch


@dataclass(frozen=True)
class Roles:
    """The trainers and readers of a run's models."""

    policy: Trainer
    readers: Mapping[str, Reader] = field(default_factory=dict)  # by the name of the role
    critic: Trainer | None = None
    others: Sequence[Any] = ()  # shapes and shardings of other arrays that stay on the devices
    micro_shapes: Sequence[Shape] = ()  # rows and length of an iteration's micro-batches
    models: Mapping[str, RoleModel] = field(default_factory=dict)  # by the name of the role

    def resident_on(self, devices: Iterable[Device]) -> list[Any]:
        """Returns shapes with shardings of the arrays of all roles that stay on these devices
        during a rollout."""
        kept = (role.kept for role in self.trained)
        read = (reader.resident for reader in self.readers.values())
        return on_devices([self.others, *kept, *read], devices)

    @property
    def trained(self) -> list[Trainer]:
        """The trained roles, in the order in which an iteration updates them."""
        return [*([self.critic] if self.critic else []), self.policy]

    @property
    def handles(self) -> list[Handle]:
        """The trainers and readers of all roles."""
        return [*self.trained, *self.readers.values()]

    @property
    def are_apart(self) -> bool:
        """Whether some roles have other devices than the rest."""
        return len({role.devices for role in self.handles}) > 1

    @property
    def learning_rates(self) -> Mapping[str, Callable[[ArrayLike], Array | np.floating]]:
        """Each trained role's function from an optimizer step to its learning rate, by the role's
        name in checkpoints."""
        trained = ((model.role.key, model.role.trained) for model in self.models.values())
        return {key: schedule_of(how.optimization) for key, how in trained if how is not None}

    @property
    def abstract_states(self) -> dict[str, Any]:
        """Shapes with shardings of the states of all trained roles, by name."""
        return {role.name: role.abstract_state for role in self.trained}

    @property
    def waited_s(self) -> float:
        """Seconds that the run waited for programs compiled at first use."""
        return sum(role.programs.waited_s for role in self.handles)

    def to_compile(self, *, by_need: bool) -> int:
        """Returns the number of programs that `compile` would compile."""
        return sum(role.to_compile(by_need=by_need) for role in self.handles)

    def compile(
        self, progress: Callable[[int, int], None] | None = None, *, by_need: bool = False
    ) -> None:
        """Compiles the programs of all roles.

        Args:
          by_need: compile only the first passes now, see `Handle.compile`.
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
        """Yields the predictions of readers, and of the trained roles whose predictions before an
        update are needed.

        Args:
          states: a function that returns the trained roles' states at the time of a prediction.
        """
        for role, reader in self.readers.items():
            name = predictions(LOGPROBS, role)
            is_column = not reader.top_k
            yield Prediction(name, reader.column, reader.devices, is_column, reader.read)
        for role in self.trained:
            if role.predicts:
                name = predictions(VALUES if role is self.critic else LOGPROBS, role.title)
                read = partial(_predict, role, states)
                yield Prediction(name, role.old, role.devices, True, read)

    def predict(self, states: States, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with all `predictions` computed."""
        for one in self.predictions(lambda: states):
            batch = one.added_to(batch)
        return batch.on_host() if self.are_apart else batch


def _predict(role: Trainer, states: Callable[[], States], batch: TrainBatch) -> TrainBatch:
    return role.predict(states()[role.name], batch)
