"""Builds the engine's and the trainer's own programs over devices that are not here.

Knows how the parts of a run are put together. Does not know which are compiled (`jobs.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import jax.numpy as jnp

from pat_jax.common.devices import Device
from pat_jax.common.json_text import of_json
from pat_jax.config.programs import ProgramChoice
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.draft.drafters import drafter_for
from pat_jax.engine.device.programs.program_specs import ProgramSpecs
from pat_jax.engine.sizing.draft_choice import drafts_of
from pat_jax.engine.sizing.memory import kv_bytes, memory_alone, memory_model, whole_sequences
from pat_jax.engine.sizing.memory_checks import layouts_without_memory
from pat_jax.engine.sizing.pool_pages import buckets_of, pages_per_replica, specs_for
from pat_jax.layout.buckets import Buckets
from pat_jax.layout.chain import layout_chain, least_tp
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import ExpertSplit, factored_mesh, padded_for
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.planning.memory import GIB, MemoryModel
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.targets import Target, paper_devices
from pat_jax.training.build import (
    DTYPES,
    build_lora,
    micro_shapes,
    rollout_policy,
)
from pat_jax.training.build_roles import build_roles, losses_of
from pat_jax.training.drafter_state import drafter_state
from pat_jax.training.role_model import RoleModel, with_free_memory
from pat_jax.training.roles import Roles
from pat_jax.training.transfer import Receivers
from pat_jax.training.update_memory import lacking_state

EOS = (0,)  # any will do: no text is generated
shared_policy = cache(Policy.from_config)  # several builds of a plan have the same one


@dataclass(frozen=True)
class Order:
    """What to compile. It is sent to the compiling process as JSON; its hash names the records."""

    target: Target
    run: ProgramChoice
    model: ModelConfig
    depths: tuple[int, ...]  # numbers of layers of the models that are compiled
    draft_model: ModelConfig | None = None  # whole at every depth
    others: Mapping[str, ModelConfig] = field(default_factory=dict)  # models of other roles

    @classmethod
    def of(
        cls,
        target: Target,
        run: ProgramChoice,
        model: ModelConfig,
        depths: Sequence[int],
        draft_model: ModelConfig | None = None,
        others: Mapping[str, ModelConfig] | None = None,
    ) -> "Order":
        """Returns an order of models as the target needs them; depth 0 is the whole model."""
        whole = {min(depth or model.num_layers, model.num_layers) for depth in depths}
        devices = paper_devices(target)
        roles = {name: padded_for(devices, one) for name, one in (others or {}).items()}
        model = padded_for(devices, model)
        return cls(target, run, model, tuple(sorted(whole)), draft_model, roles)

    def other(self, name: str, layers: int) -> ModelConfig:
        """Returns the model of another role, shortened to at most `layers` layers if the policy is
        compiled with fewer than it has."""
        model = self.others[name]
        if layers == self.model.num_layers:
            return model
        return replace(model, num_layers=min(layers, model.num_layers))

    def num_layers(self, role: str) -> int:
        """Returns the layers of a role's whole model; the policy and its reference have no name."""
        return (self.others[role] if role else self.model).num_layers

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target.text,
            "run": asdict(self.run),
            "model": asdict(self.model),
            "depths": list(self.depths),
            "draft_model": self.draft_model and asdict(self.draft_model),
            "others": {name: asdict(model) for name, model in self.others.items()},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Order":
        draft = content["draft_model"]
        return cls(
            Target.parse(content["target"]),
            of_json(ProgramChoice, content["run"]),
            of_json(ModelConfig, content["model"]),
            tuple(content["depths"]),
            draft and of_json(ModelConfig, draft),
            {name: of_json(ModelConfig, one) for name, one in content["others"].items()},
        )


@dataclass(frozen=True)
class TargetBuild:
    """A target's devices, and the parts of a run on them."""

    order: Order
    devices: Sequence[Device]

    @cached_property
    def chain(self) -> tuple[dict[Split, Layout], list[str]]:
        """Every layout that divides the model, and the reasons why other layouts do not."""
        run = self.order.run
        ways = run.rollout.expert_parallel
        width = run.rollout.expert_width
        return layout_chain(
            factored_mesh(self.devices),
            self.order.model,
            experts=ExpertSplit(ways, width),
            fsdp_size=run.fsdp_size,
        )

    @property
    def layouts(self) -> dict[Split, Layout]:
        return self.chain[0]

    @property
    def dtype(self) -> jnp.dtype:
        return DTYPES[self.order.run.dtype]

    @property
    def capacity(self) -> int:
        return self.order.run.rollout.num_responses

    @property
    def limit(self) -> float:
        """Memory of a device, in bytes."""
        given = self.order.run.rollout.device_memory_gib
        return given * GIB if given else self.order.target.chip.memory_bytes

    def roles(self, model: ModelConfig) -> Roles:
        """Returns the models of a run with this policy, each in its layout with the least TP.

        Reward models are assumed to read the policy's micro-batches.
        """
        run = self.order.run
        first = next(iter(self.layouts.values()))
        policy = Policy.from_config(model)
        models: list[RoleModel] = []
        for role in run.roles:
            if role.name in self.order.others:
                shape = self.order.other(role.name, model.num_layers)
                layout = least_tp(self.devices, shape, run.fsdp_size)
                models.append(RoleModel(role, shared_policy(shape), layout))
            else:
                models.append(RoleModel(role, policy, first))
        models = with_free_memory(models, self.limit)
        shapes = self.micro_shapes
        rests = run.rest == "host"
        of_policy = models[0]
        dtype = of_policy.dtype
        scored = [each for each in models if each.role.devices == "reward"]
        scoring = {each.role.name: each.reader(shapes, rests=rests) for each in scored}
        kept = rollout_policy(policy, run.rollout.weights, of_policy.lora)
        roles = build_roles(
            [each for each in models if each.role.name not in scoring],
            losses_of(run.roles, run.algorithm, is_on_policy=run.updates_per_step == 1),
            shapes if run.trains else (),
            Receivers(dtype, self.layouts, kept),
            rests=rests,
            others=[tree for reader in scoring.values() for tree in reader.resident],
            beside=drafter_state(self.drafter, first, model.embed_dim, dtype, learns=run.trains),
        )
        by_name = {each.role.name: each for each in models}
        return replace(roles, readers={**roles.readers, **scoring}, models=by_name)

    @cached_property
    def policy(self) -> Policy:
        """The policy of the whole model, as the rollout keeps it."""
        return self.policy_of(self.order.model)

    def policy_of(self, model: ModelConfig) -> Policy:
        own = Policy.from_config(model)
        run = self.order.run
        trained = run.policy.trained
        lora = build_lora(trained.lora, own) if trained else None
        return rollout_policy(own, run.rollout.weights, lora)

    @cached_property
    def buckets(self) -> Buckets:
        """The shapes that a run's programs are compiled for."""
        order = self.order
        return buckets_of(self.layouts, self.capacity, order.run.rollout, order.model)

    @cached_property
    def drafter(self) -> Drafter:
        """The rollouts' drafter, with the numbers of draft tokens that a step may verify."""
        order = self.order
        drafts = drafts_of(order.run.speculation, order.target.chip.platform)
        return drafter_for(drafts, order.draft_model and shared_policy(order.draft_model))

    @cached_property
    def whole(self) -> Roles:
        """The models of a run, each with all of its layers."""
        return self.roles(self.order.model)

    @cached_property
    def resident(self) -> Sequence[Any]:
        """Shapes and shardings of the arrays that training keeps on devices during a rollout."""
        return self.whole.policy.resident if self.order.run.trains else ()

    @property
    def _held(self) -> dict[str, Any]:
        """What takes memory of a device, as `kv_bytes` takes it."""
        return {"limit": self.limit, "resident": self.resident, "drafter": self.drafter}

    @cached_property
    def whole_sequences(self) -> float:
        """Number of the longest sequences that fit into the KV cache; 0 if no layout or no update
        fits."""
        if self.order.run.trains and lacking_state(self.whole, self.limit):
            return 0.0
        rollout = self.order.run.rollout
        return whole_sequences(self.policy, self.layouts, rollout, self.dtype, **self._held)

    @property
    def micro_shapes(self) -> list[tuple[int, int]]:
        """Shapes of the update's micro-batches, smallest first."""
        layout = next(iter(self.layouts.values()))
        return micro_shapes(self.order.run.micro_batches, layout.split.dp, layout.platform)

    @cached_property
    def alone(self) -> MemoryModel:
        """Memory of the whole model in each layout if no other is used, see `memory_alone`."""
        rollout = self.order.run.rollout
        return memory_alone(self.policy, self.layouts, rollout, self.dtype, **self._held)

    @cached_property
    def memory(self) -> MemoryModel:
        """Memory of the whole model: layouts that fit have the pool of a run, the others the fewest
        pages that they need."""
        rollout = self.order.run.rollout
        return memory_model(self.specs, rollout, limit=self.limit, resident=self.resident)

    @property
    def _pages(self) -> dict[Split, int]:
        """Pages of a replica in each layout: those of a run's pool if it fits, else the fewest."""
        config = self.order.run.rollout
        without_memory = layouts_without_memory(self.alone, config)
        kept = {split: x for split, x in self.layouts.items() if split not in without_memory}
        if not kept:
            return dict(self.alone.pages)
        room = kv_bytes(self.policy, kept, config, self.dtype, **self._held)
        pages = pages_per_replica(room, config, self.policy.config, kept, self.buckets, self.dtype)
        return {**self.alone.pages, **pages}

    @cached_property
    def specs(self) -> ProgramSpecs:
        config = self.order.run.rollout
        drafter = self.drafter
        layouts = self.layouts
        return specs_for(
            config, self.policy, drafter, self.dtype, EOS, layouts, self.buckets, self._pages
        )
