"""Where an update's state is: on the devices during an optimizer step, or at rest between steps.

Knows trees and shardings. Does not know which optimizer it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.tree_util import GetAttrKey

from pat_jax.common.devices import HOST_MEMORY, Device, has_host_memory, in_host_memory
from pat_jax.common.rules import require
from pat_jax.config.learning import OptimizerConfig
from pat_jax.rl.algorithm.update import Params, TrainState


@dataclass(frozen=True)
class StatePlacement:
    """Shardings of an update's state: moments like their parameters, counters on every device."""

    params: Params  # shardings of the parameters
    everywhere: NamedSharding
    is_offloaded: bool  # whether moments at rest are in the host's memory

    def at_rest(self, state: TrainState) -> TrainState:
        """Returns the shardings of a state with these shapes, between two steps."""
        there = jax.tree.map(in_host_memory, self.params) if self.is_offloaded else self.params
        return self._placed(state, there)

    def in_a_step(self, state: TrainState) -> TrainState:
        """Returns the shardings of a state with these shapes, during a step."""
        return self._placed(state, self.params)

    def on_devices(self, state: TrainState) -> TrainState | tuple[Any, ...]:
        """Returns the part of a state that is on the devices between two steps."""
        moments = {id(tree) for tree in self.offloaded(state)}
        opt_state = jax.tree.map(
            lambda node: None if id(node) in moments else node,
            state.opt_state,
            is_leaf=self._is_like_params,
        )
        return state.params, opt_state, state.step

    def offloaded(self, state: TrainState) -> list[Params]:
        """Returns the part of a state that is in the host's memory except during a step."""
        if not self.is_offloaded:
            return []
        nodes = jax.tree.leaves(state.opt_state, is_leaf=self._is_like_params)
        return [node for node in nodes if self._is_like_params(node)]

    def fetched(self, state: TrainState) -> TrainState:
        """Brings a state at rest to the devices for a step, and frees its old buffers."""
        return self._moved(state, self.in_a_step(state)) if self.is_offloaded else state

    def rested(self, state: TrainState) -> TrainState:
        """Brings a step's result to its place at rest, and frees its old buffers."""
        return self._moved(state, self.at_rest(state)) if self.is_offloaded else state

    def _moved(self, state: TrainState, shardings: TrainState) -> TrainState:
        # Outside of the step's program, so that the step updates the moments in place. Inside it,
        # compilers would hold all moments on a device twice, as they come and as they go.
        opt_state = jax.device_put(state.opt_state, shardings.opt_state)
        for there, here in zip(*map(jax.tree.leaves, (state.opt_state, opt_state)), strict=True):
            if there.sharding != here.sharding:
                there.delete()  # JAX donates nothing from one memory to another
        return replace(state, opt_state=opt_state)

    def _placed(self, state: TrainState, moments: Params) -> TrainState:
        """Shardings of a state whose moments have the shardings `moments`."""

        def place(path: tuple[Any, ...], node: Any) -> Any:
            if not self._is_like_params(node):
                return jax.tree.map(lambda _: self.everywhere, node)
            return moments if path[0] == GetAttrKey("opt_state") else self.params

        return jax.tree_util.tree_map_with_path(place, state, is_leaf=self._is_like_params)

    def _is_like_params(self, node: object) -> bool:
        return jax.tree.structure(node) == jax.tree.structure(self.params)


def check_offload(config: OptimizerConfig, devices: Sequence[Device]) -> None:
    """Raises OptionError if moments are to be offloaded but the devices have no host memory."""
    require(
        not config.offload or has_host_memory(devices),
        "optimizer.offload",
        config.offload,
        f"false on devices of platform {devices[0].platform}, which know no {HOST_MEMORY} memory",
    )
