"""The handles of a run's models, and how much room they leave.

Knows roles and what they are built from. Does not know how their weights come (`init_state.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pat_jax.config.run import RunConfig
from pat_jax.engine.sizing.device_memory import memory_limit
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Policy
from pat_jax.planning.types import Split
from pat_jax.run.roles.placed_layouts import PlacedLayouts
from pat_jax.run.roles.places import Places
from pat_jax.run.roles.reward_models import RewardModels, resident_of
from pat_jax.run.roles.rollouts import Rollouts
from pat_jax.training.build_roles import CriticModel, build_roles
from pat_jax.training.reader import Reader
from pat_jax.training.roles import Roles
from pat_jax.training.update_memory import lacking_state


@dataclass(frozen=True)
class RunModels:
    """What the handles of a run's models are built from."""

    policy: Policy
    placed: PlacedLayouts
    places: Places
    critic: CriticModel | None
    teacher: Mapping[str, Reader]
    reward_models: RewardModels
    rollouts: Rollouts

    def build(self, config: RunConfig, layouts: dict[Split, Layout]) -> Roles:
        """Returns the handles, for rollouts in `layouts`."""
        scoring = (one.reader for one in self.reward_models.values())
        for reader in (*self.teacher.values(), *scoring):
            reader.rests = config.roles.rest == "host"
        drafter, others = self.rollouts.drafter, resident_of(self.reward_models)
        made_of = drafter, self.teacher, others, self.critic
        return build_roles(
            config,
            self.policy,
            self.placed.policy,
            layouts,
            *made_of,
            reference=self.placed.reference,
            carriers=self.placed.carriers,
            row_shards=self.places.row_shards(self.placed.policy.split.dp),
        )

    def room(self, config: RunConfig, layouts: dict[Split, Layout]) -> float:
        """Returns how many whole sequences a KV cache holds beside the models; 0 if no update
        fits."""
        roles = self.build(config, layouts)
        if lacking_state(roles, memory_limit(config.rollout, self.rollouts.devices)):
            return 0.0
        resident = roles.resident_on(self.rollouts.devices)
        return self.rollouts.whole_sequences(layouts, resident)
