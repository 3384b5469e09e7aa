"""Builds the parts of a run from its configuration. All mistakes in options and files are found
here, before anything is compiled or written."""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.common.hub import is_checkpoint
from pat_jax.config.by_model import KnownModel, Options, settled
from pat_jax.config.role_table import reward_roles, role_table
from pat_jax.config.run import RolesConfig, RunConfig
from pat_jax.config.shared import LayoutChoice
from pat_jax.config.task import TaskChoice
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sizing.device_memory import memory_limit
from pat_jax.engine.sizing.draft_choice import checkpoint_shape
from pat_jax.engine.sizing.layout_choice import (
    check_lengths,
    check_vocabulary_options,
    scripted_planner,
    worth_planning,
)
from pat_jax.engine.sizing.memory import memory_model
from pat_jax.layout.layout import Layout, shard_bytes
from pat_jax.layout.mesh import padded_for
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.planning.latency.profile import Profile, Subject
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Split
from pat_jax.rl.text.tokenizer import Tokenizer, check_vocabulary
from pat_jax.run.checkpoints.orbax_io import register_owned_arrays
from pat_jax.run.files.folder import check_resumed
from pat_jax.run.roles.fingerprint import fingerprint as fingerprint_of
from pat_jax.run.roles.models import RunModels
from pat_jax.run.roles.placed_layouts import PlacedLayouts
from pat_jax.run.roles.places import Places
from pat_jax.run.roles.resting import Rest, settled_rest
from pat_jax.run.roles.reward_models import RewardModels, build_reward_models
from pat_jax.run.roles.role_models import Division, model_of
from pat_jax.run.roles.rollouts import Rollouts, other_kernels
from pat_jax.run.roles.weights import check_weights
from pat_jax.run.start.profiles import find_profile, profile_subject
from pat_jax.run.start.task import Task, check_task, load_task, load_tokenizer
from pat_jax.training.build import micro_shapes
from pat_jax.training.build_roles import losses_of
from pat_jax.training.reader import Reader
from pat_jax.training.remat_choice import settled_remat
from pat_jax.training.role_model import RoleModel, with_free_memory
from pat_jax.training.roles import Roles
from pat_jax.training.state_placement import check_offload
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import check_state

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """The parts of a run, before anything is compiled."""

    config: RunConfig  # every `auto` settled
    task: Task
    policy: Policy
    layouts: dict[Split, Layout]
    dropped: Sequence[str]  # why layouts of the chain are missing
    shortened: str  # which lengths the model's context has shortened, if any
    by_memory: Sequence[str]  # why models wait in the host's memory, and what is recomputed
    engine: RolloutEngine
    roles: Roles
    scripted: Planner | None  # follows the path of --layout; None: plan by cost
    fingerprint: Mapping[str, object]  # a checkpoint must have the same to be resumed
    subject: Subject  # model and devices, which the profile must have too
    profile: Profile | None  # measured before this start, if any was
    memory: MemoryModel
    reward_models: RewardModels
    places: Places

    @property
    def trainer(self) -> Trainer:
        """The policy's trainer."""
        return self.roles.policy

    def held_without_rollouts(self, reader: Reader) -> int | None:
        """Returns the bytes that models keep on a reader's devices; None if these do rollouts."""
        if not reader.devices.isdisjoint(self.engine.mesh.devices.flat):
            return None
        return shard_bytes(self.roles.resident_on(reader.devices))

    @property
    def devices(self) -> list[Device]:
        """All devices of the run."""
        return list(self.places.devices)


def build(config: RunConfig, devices: Sequence[Device]) -> Setup:
    """Builds all parts of a run. Raises UserError if anything in the configuration or its files
    cannot work. Cheap checks come first: options, headers of files, layouts. Then come the
    tokenizer and the data, which take seconds, and the kernels on these devices. Weights, which may
    have to be downloaded, come last."""
    settled = settle(config, devices)
    setup = _built(settled, devices)
    kernels = other_kernels(setup.config.rollout, setup.engine, also=("rows",))
    if kernels is not None:
        setup = _built(settled, devices, kernels, setup.reward_models)
    scoring = (one.model for one in setup.reward_models.values())
    for model in (*setup.roles.models.values(), *scoring):
        role = model.role
        check_weights(role.source, role.option, None if role.devices == "reward" else role.head)
    check_weights(config.speculation.draft_model, "speculation.source")
    return setup


@dataclass(frozen=True)
class Settled:
    """Options in which every `auto` is settled, except --roles.rest, which depends on memory."""

    config: RunConfig
    model: ModelConfig
    shortened: str  # which lengths the model's context has shortened, if any


def settle(config: RunConfig, devices: Sequence[Device]) -> Settled:
    """Settles the options, and checks them with the model's shape. Raises UserError if they cannot
    work."""
    config.lora.check_base(config.model)
    check_task(config.task)
    model = model_config(config.task, config.layout_choice, devices)
    config, shortened = settled_options(config, model, devices)
    check_lengths(config.rollout, model, config.model)
    check_vocabulary_options(config.rollout, model)
    return Settled(config, model, shortened)


def _built(
    settled: Settled,
    devices: Sequence[Device],
    kernels: Kernels | None = None,
    reward_models: RewardModels | None = None,
) -> Setup:
    config = settled.config
    model = settled.model
    places = Places.of(config.placement, devices, config.on_one_base)
    if places.is_split:
        register_owned_arrays()
    of_rollout = places["rollout"]
    subject = profile_subject(model, config.rollout, config.compute_dtype, of_rollout)
    profile = find_profile(config.profile, subject)
    policy = Policy.from_config(model)
    check_offload(config.optimizer, devices)
    placed = PlacedLayouts.of(
        model, places, config.rollout, config.layout_choice, config.fsdp_size, kernels
    )
    layouts = placed.rollouts
    dropped = [*placed.dropped]
    models = _models(config, policy, placed.policy, places)
    fingerprint = check_resumed(config, fingerprint_of(models))
    if reward_models is None:
        reward_models = _reward_models(config, places["reward"])
    task = load_task(config.task, checked_tokenizer(config.task, model))
    rollouts = Rollouts.of(config.engine, policy, of_rollout)
    handles = _handles(config, models, placed, places, reward_models, rollouts)
    rest, resting = _settled_rest(config, devices, partial(handles.room, layouts))
    roles = handles.build(layouts, rest)
    resident = roles.resident_on(of_rollout)
    alone = rollouts.memory_alone(layouts, resident)
    if config.learns:
        check_state(roles, alone.limit)
    remat, recomputed = settled_remat(config.remat, roles, alone.limit)
    config = replace(config, roles=RolesConfig(rest), remat=remat)
    if config.layout_choice.is_planned:
        layouts, more = worth_planning(config.rollout, layouts, alone, profile and profile.latency)
        dropped += more
    roles = handles.with_remat(remat).build(layouts, rest)
    engine = rollouts.engine(layouts, task.tokenizer.eos_ids, resident)
    return Setup(
        config,
        task,
        policy,
        layouts,
        dropped,
        settled.shortened,
        [resting, recomputed],
        engine,
        roles,
        scripted_planner(config.layout_choice, layouts),
        fingerprint,
        subject,
        profile,
        memory_model(engine.specs, config.rollout, limit=alone.limit, resident=resident),
        reward_models,
        places,
    )


def _models(
    config: RunConfig, policy: Policy, layout: Layout, places: Places
) -> Sequence[RoleModel]:
    table = role_table(config, layout.platform)
    division = Division(config.rollout.page_size, config.fsdp_size)
    of_policy = RoleModel(table[0], policy, layout)
    longest = config.rollout.max_length
    others = (role for role in table[1:] if role.devices != "reward")  # those read texts
    models = [model_of(role, of_policy, places[role.devices], division, longest) for role in others]
    limit = memory_limit(config.rollout.device_memory_gib, places["rollout"])
    return with_free_memory([of_policy, *models], limit)


def _reward_models(config: RunConfig, devices: Sequence[Device]) -> RewardModels:
    roles = reward_roles(config, devices[0].platform)
    division = Division(config.rollout.page_size, config.fsdp_size)
    return build_reward_models(roles, config.reward_model, config.rollout, devices, division)


def _settled_rest(
    config: RunConfig, devices: Sequence[Device], room: Callable[[Rest], float]
) -> tuple[Rest, str]:
    return settled_rest(
        config.roles.rest,
        devices,
        room,
        sequences=config.rollout.num_responses,
        learns=config.learns,
    )


def _handles(
    config: RunConfig,
    models: Sequence[RoleModel],
    placed: PlacedLayouts,
    places: Places,
    reward_models: RewardModels,
    rollouts: Rollouts,
) -> RunModels:
    first = placed.policy
    shards = places.row_shards(first.split.dp)
    return RunModels(
        models,
        losses_of(
            [each.role for each in models],
            config.algorithm,
            is_on_policy=config.updates_per_step == 1,
        ),
        micro_shapes(config.micro_batches, shards, first.platform) if config.learns else (),
        placed.carriers,
        reward_models,
        rollouts,
        trains_drafter=config.train,
    )


def checked_tokenizer(asked: TaskChoice, model: ModelConfig) -> Tokenizer:
    """Returns the model's tokenizer. Raises UserError if one of its token ids has no row in the
    model's embedding."""
    tokenizer = load_tokenizer(asked)
    check_vocabulary(tokenizer, model.vocab_size, source=asked.model)
    return tokenizer


def model_config(
    asked: TaskChoice, layouts: LayoutChoice, devices: Sequence[Device]
) -> ModelConfig:
    """Returns the model's shape, padded so that it divides over the devices in each layout that may
    be asked for. Raises UserError if `asked.model` is neither a usable checkpoint directory nor a
    built-in shape."""
    if shape := checkpoint_shape(asked.model, "model"):
        model = shape
    elif os.sep in asked.model:
        raise UserError(
            f"option --model is {asked.model!r}: expected a Hugging Face checkpoint directory or "
            "the name of a built-in shape, but there is no such directory."
        )
    elif asked.data.is_arithmetic:
        model = preset(asked.model, vocab_size=load_tokenizer(asked).vocab_size)
    else:
        model = preset(asked.model)
    names = " ".join([layouts.layout, *(name for name, _ in layouts.path)])
    return padded_for(devices, model, [int(n) for n in re.findall(r"tp(\d+)", names)])


def settled_options(
    config: Options, model: ModelConfig, devices: Sequence[Device]
) -> tuple[Options, str]:
    """Fills in the `auto` options for this model and these devices (`config.by_model.settled`).
    Returns them with a note on what was shortened."""
    context = model.max_position
    platform = devices[0].platform
    return settled(config, KnownModel(config.model, is_checkpoint(config.model), context, platform))
