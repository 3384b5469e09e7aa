"""The rollouts of a run: predicts their memory, and builds their engine.

Knows options and memory. Does not know data, nor what is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pat_jax.common.devices import Device
from pat_jax.common.hosts.together import process_group
from pat_jax.config.engine import EngineChoice
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sizing.device_memory import cache_limit, memory_limit
from pat_jax.engine.sizing.draft_choice import DraftChoice, wanted_drafts
from pat_jax.engine.sizing.memory import kv_bytes, memory_alone, most_at_once, whole_sequences
from pat_jax.engine.sizing.memory_checks import check_memory
from pat_jax.engine.warm_up.kernel_check import usable_kernels
from pat_jax.layout.layout import Layout
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.policy import Policy
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.types import Split
from pat_jax.training.build import DTYPES, build_lora, rollout_policy


@dataclass(frozen=True)
class Rollouts:
    asked: EngineChoice
    policy: Policy  # with the weights' format in rollouts, perhaps quantized
    devices: Sequence[Device]
    drafts: DraftChoice

    @classmethod
    def of(cls, asked: EngineChoice, policy: Policy, devices: Sequence[Device]) -> "Rollouts":
        """Returns the rollouts of a run that trains `policy`."""
        platform = devices[0].platform
        longest = asked.rollout.max_length
        drafts = wanted_drafts(asked.speculation, policy, platform, longest, folder=asked.model)
        kept = rollout_policy(policy, asked.rollout.weights, build_lora(asked.lora, policy))
        return cls(asked, kept, devices, drafts)

    @property
    def drafter(self) -> Drafter:
        return self.drafts.drafter

    @property
    def dtype(self) -> jnp.dtype:
        return DTYPES[self.asked.dtype]

    @property
    def device_bytes(self) -> float:
        return memory_limit(self.asked.rollout.device_memory_gib, self.devices)

    def memory_alone(self, layouts: dict[Split, Layout], resident: object = ()) -> MemoryModel:
        """Returns the memory that each layout takes of a device. A layout that a rollout may start
        in has to fit. `resident` has shapes and shardings of other arrays on the devices."""
        rollout = self.asked.rollout
        choice = self.asked.layouts
        held = {"resident": resident, "drafter": self.drafter, "limit": self.device_bytes}
        memory = memory_alone(self.policy, layouts, rollout, self.dtype, **held)
        starts = list(layouts) if choice.is_planned else list(layouts)[:1]
        check_memory(memory, starts, choice.option)
        return memory

    def whole_sequences(self, layouts: dict[Split, Layout], resident: object) -> float:
        """Returns how many of the longest sequences have room in the KV cache at once. `resident`
        is as in `memory_alone`."""
        held = {"limit": self.device_bytes, "resident": resident, "drafter": self.drafter}
        return whole_sequences(self.policy, layouts, self.asked.rollout, self.dtype, **held)

    def engine(
        self, layouts: dict[Split, Layout], eos_ids: Sequence[int], resident: object = ()
    ) -> RolloutEngine:
        """Builds the engine; `resident` is as in `memory_alone`."""
        rollout = self.asked.rollout
        drafts = self.drafts
        limit = cache_limit(rollout.device_memory_gib, self.devices)
        held: Any = {"limit": limit, "resident": resident, "drafter": self.drafter}
        return RolloutEngine(
            self.policy,
            self.devices,
            rollout,
            capacity=most_at_once(self.policy, layouts, rollout, self.dtype, self.devices),
            eos_ids=eos_ids,
            dtype=self.dtype,
            layouts=layouts,
            kv_bytes=kv_bytes(self.policy, layouts, rollout, self.dtype, **held),
            drafter=self.drafter,
            drafting=drafts.reason,
            # Otherwise compiled programs would depend on the clock, or differ between processes.
            by_need=rollout.compile != "all"
            and not self.asked.is_deterministic
            and process_group().count == 1,
        )


def other_kernels(
    rollout: RolloutConfig, engine: RolloutEngine, also: Sequence[str] = ()
) -> Kernels | None:
    """Checks the engine's kernels on its devices, and those named in `also`. Returns the kernels to
    use instead, or None if all of the engine's own work."""
    layouts = list(engine.layouts.values())
    drafts = engine.specs.drafts.num_draft_tokens
    kernels = usable_kernels(
        layouts,
        engine.policy.config,
        page_size=rollout.page_size,
        dtype=engine.dtype,
        weights=rollout.weights,
        names=("decode", "prefill", "experts", *["verify"] * bool(drafts), *also),
    )
    return None if kernels == layouts[0].kernels else kernels
