"""Builds the handles of a run's models (`Roles`), and computes how much KV cache they leave.

Does not know how weights are loaded (`role_params.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pat_jax.common.rules import require
from pat_jax.config.compute import Remat
from pat_jax.layout.layout import Layout
from pat_jax.planning.types import Split
from pat_jax.rl.batches.packing import Shape
from pat_jax.run.roles.resting import Rest
from pat_jax.run.roles.reward_models import RewardModels, resident_of
from pat_jax.run.roles.rollouts import Rollouts
from pat_jax.training.build_roles import Losses, build_roles
from pat_jax.training.carrier import Carrier
from pat_jax.training.drafter_state import drafter_state
from pat_jax.training.role_model import RoleModel
from pat_jax.training.roles import Roles
from pat_jax.training.transfer import Receivers
from pat_jax.training.update_memory import lacking_state


@dataclass(frozen=True)
class RunModels:
    """The parts from which the handles of a run's models are built."""

    models: Sequence[RoleModel]  # the policy first
    losses: Losses
    shapes: Sequence[Shape]  # of micro-batches; empty if nothing is learned
    carriers: Mapping[Split, Carrier]  # send weights to rollouts on other devices
    reward_models: RewardModels
    rollouts: Rollouts
    trains_drafter: bool

    def __post_init__(self):
        require(
            not (self.carriers and self.rollouts.drafter.drafts.is_generated),
            "speculation.source",
            self.rollouts.asked.speculation.source,
            "drafts that are copied (suffix) or none, where rollouts have other devices than the policy",
        )

    def build(self, layouts: dict[Split, Layout], rest: Rest) -> Roles:
        """Returns the handles, for rollouts in `layouts`.

        Args:
          rest: where models wait while no stage needs them.
        """
        rests = rest == "host"
        for one in self.reward_models.values():
            one.reader.rests = rests
        policy = self.models[0]
        rollouts = self.rollouts
        return build_roles(
            self.models,
            self.losses,
            self.shapes,
            Receivers(policy.dtype, layouts, rollouts.policy, self.carriers),
            rests=rests,
            others=resident_of(self.reward_models),
            beside=drafter_state(
                rollouts.drafter,
                policy.layout,
                policy.policy.config.embed_dim,
                policy.dtype,
                learns=self.trains_drafter,
            ),
        )

    def with_remat(self, form: Remat) -> "RunModels":
        """Returns these parts with this form of rematerialization in place of `auto`."""
        models = [replace(one, role=one.role.with_remat(form)) for one in self.models]
        return replace(self, models=models)

    def room(self, layouts: dict[Split, Layout], rest: Rest) -> float:
        """Returns how many sequences of full length the KV cache can hold with the models in
        memory; 0 if no update fits."""
        roles = self.build(layouts, rest)
        rollouts = self.rollouts
        if lacking_state(roles, rollouts.device_bytes):
            return 0.0
        return rollouts.whole_sequences(layouts, roles.resident_on(rollouts.devices))
