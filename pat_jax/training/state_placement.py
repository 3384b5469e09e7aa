"""Where a training state is, devices or host: between two updates, in an update, and in its steps.

Knows trees and shardings. Does not know which optimizer it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding
from jax.tree_util import GetAttrKey

from pat_jax.common.devices import HOST_MEMORY, Device, has_host_memory
from pat_jax.common.rules import require
from pat_jax.config.optimizer import OptimizerConfig
from pat_jax.rl.algorithm.update import Params, TrainState
from pat_jax.training.rest import at_rest, moved

# The part of a training state that is in the host's memory between two updates.
Resting = Literal["nothing", "moments", "state"]


@dataclass(frozen=True)
class StatePlacement:
    """Shardings of a training state: moments like their parameters, counters on every device."""

    params: Params  # shardings of the parameters
    everywhere: NamedSharding
    is_offloaded: bool = False  # whether moments are on the devices only in an optimizer step
    rests: Resting = "nothing"

    def at_rest(self, state: TrainState) -> TrainState:
        """Returns the shardings of a state with these shapes, between two updates."""
        return self._placed(state, params=self.rests != "state", moments=self._keeps_moments)

    def initial(self, state: TrainState) -> TrainState:
        """Returns the shardings of a new state with these shapes. Its parameters are on the
        devices, since they reuse the buffers of the loaded ones."""
        return self._placed(state, params=True, moments=self._keeps_moments)

    def in_an_update(self, state: TrainState) -> TrainState:
        """Returns the shardings of a state with these shapes, during an update's passes."""
        return self._placed(state, params=True, moments=not self.is_offloaded)

    def in_a_step(self, state: TrainState) -> TrainState:
        """Returns the shardings of a state with these shapes, during an optimizer step."""
        return self._placed(state, params=True, moments=True)

    def on_devices(self, state: TrainState, *, in_an_update: bool = False) -> tuple[Any, ...]:
        """Returns the part of a state that is on the devices between two updates or, if
        `in_an_update`, during an update's passes."""
        is_here = not self.is_offloaded if in_an_update else self._keeps_moments
        moments = set[int]() if is_here else {id(tree) for tree in self._moments(state)}
        opt_state = jax.tree.map(
            lambda node: None if id(node) in moments else node,
            state.opt_state,
            is_leaf=self._is_like_params,
        )
        has_params = in_an_update or self.rests != "state"
        return state.params if has_params else None, opt_state, state.step

    def offloaded(self, state: TrainState) -> list[Params]:
        """Returns the moments that a step brings to the devices; empty if they are always there."""
        return self._moments(state) if self.is_offloaded else []

    def begun(self, state: TrainState) -> TrainState:
        """Returns a state moved to the devices for an update, and frees its old buffers."""
        return self._moved(state, self.in_an_update)

    def ended(self, state: TrainState) -> TrainState:
        """Returns an update's state moved to where it rests, and frees its old buffers."""
        return self._moved(state, self.at_rest)

    # Outside of the step's program, so that the step updates the moments in place. Inside it,
    # compilers would hold all moments on a device twice, as they come and as they go.
    def fetched(self, state: TrainState) -> TrainState:
        """Returns the state with moments on the devices for a step, and frees their old buffers."""
        return self._moved(state, self.in_a_step)

    def rested(self, state: TrainState) -> TrainState:
        """Returns the state with moments offloaded after a step, and frees their old buffers."""
        return self._moved(state, self.in_an_update)

    def _moved(self, state: TrainState, place: Any) -> TrainState:
        if self.rests == "nothing" and not self.is_offloaded:
            return state
        return moved(state, place(state))

    @property
    def _keeps_moments(self) -> bool:
        """Whether moments are on the devices between two updates."""
        return not self.is_offloaded and self.rests == "nothing"

    def _placed(self, state: TrainState, *, params: bool, moments: bool) -> TrainState:
        """Returns shardings: on the devices for what an argument names, the rest on the host."""
        of_params, of_moments = (
            self.params if is_here else at_rest(self.params) for is_here in (params, moments)
        )

        def place(path: tuple[Any, ...], node: Any) -> Any:
            if not self._is_like_params(node):
                return jax.tree.map(lambda _: self.everywhere, node)
            return of_moments if path[0] == GetAttrKey("opt_state") else of_params

        return jax.tree_util.tree_map_with_path(place, state, is_leaf=self._is_like_params)

    def _moments(self, state: TrainState) -> list[Params]:
        nodes = jax.tree.leaves(state.opt_state, is_leaf=self._is_like_params)
        return [node for node in nodes if self._is_like_params(node)]

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
