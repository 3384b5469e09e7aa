"""Predictions of a role on a part of its devices, with copies of its parameters.

The copies are there for a while only: in the tail of a rollout, on devices that it has left. Knows
parameters and layouts. Does not know when anything is read (`run/tail_reads.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pat_jax.common.pytree import with_sharding
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.programs.programs import Key
from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.training.carrier import carried
from pat_jax.training.reader import Reader
from pat_jax.training.rest import fetched
from pat_jax.training.roles import States
from pat_jax.training.trainable_params import TrainableParams


@dataclass
class CopiedReader:
    """Reads with copies of a role's parameters.

    Args:
      reader: on a part of the role's devices, without parameters.
      held: the role's parameters.
      source: a layout of the role's devices with the shards of `reader`. Each process has all that
        it needs of them.
      params: returns the role's parameters, on the devices or in the host's memory, from the
        present states of trained roles.
    """

    reader: Reader
    held: TrainableParams
    source: Layout
    params: Callable[[States], Params]

    def __post_init__(self):
        gathered = self.source.param_shardings(self.held.policy, role="train")
        key = Key("gather", self.held.layout.split)
        self.reader.programs.declare(key, _copied, self.held.abstract, out_shardings=gathered)
        self._gather = key

    @property
    def gathered(self) -> Params:
        """Shapes with shardings of what `begin` copies from."""
        shardings = self.source.param_shardings(self.held.policy, role="train")
        return with_sharding(self.held.abstract, shardings)

    @property
    def column(self) -> str:
        return self.reader.column

    def begin(self, states: States) -> None:
        """Copies the parameters. All of the role's devices take part."""
        with fetched(self.params(states), self.held.shardings) as here:
            gathered = self.reader.programs[self._gather](here)
            copied = carried(gathered, self.reader.held.shardings)
            self.reader.params = jax.block_until_ready(copied)

    def end(self) -> None:
        """Frees the copies."""
        self.reader.release()

    def read(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with the role's column; between `begin` and `end`."""
        return self.reader.read(batch)


def frozen_params(role: Reader, states: States) -> Params:
    """The parameters of a frozen role, whatever the states of trained ones."""
    del states
    assert role.params is not None, "a run sets them before it reads"
    return role.params


def _copied(params: Params) -> Params:
    # Also what needs no gathering: the copies are deleted, the parameters stay.
    return jax.tree.map(jnp.copy, params)
