"""What a model takes of devices that need not be there, by the engine's own layouts and accounts.

Nothing is compiled and no array is made: temporaries of programs are not known here, but for the
tenth of a device that `planning/memory.py` leaves to them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import jax.numpy as jnp

from pat_jax.config import RolloutConfig
from pat_jax.devices import Device
from pat_jax.engine.layout import Layout, factored_mesh, layout_chain
from pat_jax.engine.rollout import RolloutEngine
from pat_jax.memory import kv_bytes, memory_model
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.types import Split
from pat_jax.profiling.targets import Target
from pat_jax.pytree import with_sharding


@dataclass(frozen=True)
class PaperDevice:
    """What a mesh asks of a device."""

    id: int
    process_index: int  # the host
    platform: str = "gpu"  # no torus: only numbers of devices count here
    device_kind: str = "on paper"


def paper_devices(devices_per_host: int, num_hosts: int = 1) -> list[Device]:
    return [
        cast(Device, PaperDevice(host * devices_per_host + number, host))
        for host in range(num_hosts)
        for number in range(devices_per_host)
    ]


@dataclass(frozen=True)
class OnPaper:
    """A model on devices, and what its layouts take of them."""

    model: ModelConfig
    devices: Sequence[Device]
    config: RolloutConfig
    dtype: jnp.dtype
    limit: float  # bytes of a device
    # float32 parameters and both moments of AdamW stay on the devices during a rollout
    is_trained: bool = True

    @cached_property
    def _chain(self) -> tuple[dict[Split, Layout], list[str]]:
        return layout_chain(factored_mesh(self.devices), padded(self.model, len(self.devices)))

    @property
    def layouts(self) -> dict[Split, Layout]:
        """All that divide the model."""
        return self._chain[0]

    @property
    def undivided(self) -> list[str]:
        """Why other layouts do not."""
        return self._chain[1]

    @cached_property
    def _resident(self) -> list[Any]:
        """Shapes of what stays while a rollout runs; the lowest TP is the trainer's layout."""
        if not self.is_trained:
            return []
        policy = Policy.from_config(padded(self.model, len(self.devices)))
        layout = next(iter(self.layouts.values()))
        shardings = layout.param_shardings(policy, role="train")
        return [with_sharding(policy.abstract_params, shardings)] * 3

    def memory(self, layouts: Mapping[Split, Layout]) -> MemoryModel:
        """What `layouts` take, when they are all that a rollout may use: pools share the memory that
        the heaviest of them leaves.
        """
        policy = Policy.from_config(padded(self.model, len(self.devices)))
        policy, resident = policy.with_weights(self.config.weights), self._resident
        engine = RolloutEngine(
            policy,
            self.devices,
            self.config,
            capacity=self.config.prompts_per_step * self.config.num_generations,
            eos_ids=(0,),
            dtype=self.dtype,
            layouts=dict(layouts),
            kv_bytes=kv_bytes(
                policy, layouts, self.config, self.dtype, limit=self.limit, resident=resident
            ),
        )
        return memory_model(engine.catalogue, self.config, limit=self.limit, resident=resident)


def padded(model: ModelConfig, num_devices: int) -> ModelConfig:
    """Its vocabulary padded so that every layout can divide it."""
    return replace(model, vocab_multiple=math.lcm(model.vocab_multiple, num_devices))


def devices_of(target: Target) -> list[Device]:
    return paper_devices(target.devices_per_host, target.num_hosts)
