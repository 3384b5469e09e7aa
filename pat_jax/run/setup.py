"""Puts a run together from its configuration. Everything that can be wrong is found out here,
before anything is compiled or written."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from pat_jax.common.devices import KEPT_DIR, PROFILE_DIR, Device
from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import company
from pat_jax.common.hub import is_checkpoint, local_checkpoint
from pat_jax.common.rules import require
from pat_jax.config.by_model import KnownModel, Options, settled
from pat_jax.config.run import RunConfig
from pat_jax.engine.device.draft.draft_model import DraftSource
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sizing.draft_choice import DraftChoice, checkpoint_shape, wanted_drafts
from pat_jax.engine.sizing.draft_memory import Drafter
from pat_jax.engine.sizing.layout_choice import (
    check_batch,
    check_lengths,
    check_vocabulary_options,
    scripted_planner,
    wanted_layouts,
    worth_planning,
)
from pat_jax.engine.sizing.memory import (
    cache_limit,
    check_memory,
    kv_bytes,
    layouts_without_memory,
    memory_alone,
    memory_limit,
    memory_model,
    most_at_once,
)
from pat_jax.layout.layout import Layout, layout_chain
from pat_jax.layout.mesh import factored_mesh, padded_for
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.planning.latency.profile import Profile, ProfileError, Subject, load_profile
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Split
from pat_jax.rl.text.tokenizer import Tokenizer, check_vocabulary
from pat_jax.run.checkpoints.meta import check_fingerprint
from pat_jax.run.process.folder import CHECKPOINTS
from pat_jax.run.results.weights import check_weights
from pat_jax.run.start.adapters import first_adapters, identity
from pat_jax.run.start.kernels import other_kernels
from pat_jax.run.task import Task, check_task, load_task, load_tokenizer
from pat_jax.training.build import DTYPES, build_lora, build_trainer, rollout_policy
from pat_jax.training.state_placement import check_offload
from pat_jax.training.trained import Leaves
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import check_state

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """The parts of a run, nothing compiled yet."""

    config: RunConfig  # with nothing open
    task: Task
    policy: Policy
    layouts: dict[Split, Layout]
    dropped: Sequence[str]  # why layouts of the chain are missing
    shortened: str  # which lengths the model's context has shortened, if any
    engine: RolloutEngine
    trainer: Trainer
    scripted: Planner | None  # the path that the options write down; None: plan by cost
    fingerprint: Mapping[str, object]  # what a checkpoint has to share with this run
    subject: Subject  # what a profile has to be of
    profile: Profile | None  # measured before, if it was
    memory: MemoryModel

    def initial_params(self, config: RunConfig) -> Leaves:
        """Initial values of what is trained."""
        if lora := self.trainer.trained.lora:
            return first_adapters(self.trainer, lora, config.lora, config.seed)
        return self.initial_policy(config, self.trainer.trained.weight_dtype)

    def initial_policy(self, config: RunConfig, dtype: jnp.dtype) -> Params:
        """What training begins with, or the adapters are added to."""
        shardings = self.trainer.trained.base_shardings
        if Path(folder := local_checkpoint(config.model)).is_dir():
            return load_params(folder, self.policy, shardings, dtype)
        return self.policy.init(config.seed, shardings, dtype)


def build(config: RunConfig, devices: Sequence[Device]) -> Setup:
    """Raises UserError for whatever in the configuration or its files cannot work.

    Cheap checks come first: options, headers of files, layouts. Then come the tokenizer and the data,
    which take seconds, and the kernels on these devices. Weights, which may have to be downloaded,
    come last.
    """
    setup = _built(config, devices)
    kernels = other_kernels(setup.config, setup.engine, also=("rows",))
    if kernels is not None:
        setup = _built(config, devices, kernels)
    check_weights(config.model)
    check_weights(config.speculation.draft_model, "speculation.source")
    return setup


def _built(config: RunConfig, devices: Sequence[Device], kernels: Kernels | None = None) -> Setup:
    check_task(config)
    require(
        config.lora.export == "merged" or is_checkpoint(config.model),
        "lora.export",
        config.lora.export,
        f"merged with --model {config.model!r}: its base is random numbers that no other program has",
    )
    model = model_config(config, devices)
    config, shortened = settled_options(config, model, devices)
    check_lengths(config, model)
    check_vocabulary_options(config, model)
    subject = profile_subject(config, model, devices)
    profile = find_profile(config, subject)
    policy = Policy.from_config(model)
    fingerprint = _fingerprint(config, policy)
    if config.resume:
        check_fingerprint(Path(config.run_dir) / CHECKPOINTS, fingerprint)
    check_offload(config.optimizer, devices)
    mesh = factored_mesh(devices)
    chain, dropped = layout_chain(mesh, model, kernels)
    layouts = wanted_layouts(config, chain, mesh, model)
    check_batch(config, layouts)
    tokenizer = checked_tokenizer(config, model)
    task = load_task(config, tokenizer)
    first = next(iter(chain.values()))
    drafts = _drafts(config, policy, devices)
    trainer = build_trainer(config, policy, first, layouts, drafts.drafter)
    resident = trainer.resident
    alone = _alone(config, policy, devices, layouts, resident, drafts.drafter)
    if config.train or config.warm_start.steps:
        check_state(trainer, alone.limit)
    if config.is_planned:
        kept, more = worth_planning(config, layouts, alone, profile and profile.latency)
        dropped += more
        if len(kept) < len(layouts):
            layouts, trainer = kept, build_trainer(config, policy, first, kept, drafts.drafter)
    engine = _engine(config, policy, devices, layouts, tokenizer.eos_ids, resident, drafts=drafts)
    return Setup(
        config,
        task,
        policy,
        layouts,
        dropped,
        shortened,
        engine,
        trainer,
        scripted_planner(config, layouts),
        fingerprint,
        subject,
        profile,
        memory_model(engine.specs, config.rollout, limit=alone.limit, resident=resident),
    )


def _fingerprint(config: RunConfig, policy: Policy) -> Mapping[str, object]:
    own = {"has_reference": config.algorithm.beta > 0}
    return asdict(policy.config) | own | identity(build_lora(config.lora, policy))


def build_engine(config: RunConfig, model: ModelConfig, devices: Sequence[Device]) -> RolloutEngine:
    """The rollout's part of a run alone, without its data. Raises UserError as `build` does, except for
    the weights of `config.model`, which not every caller needs."""
    engine = _built_engine(config, model, devices)
    scores = ("rows",) if config.rollout.weights != "auto" else ()  # the gap to the full weights
    kernels = other_kernels(config, engine, also=scores)
    if kernels is not None:
        engine = _built_engine(config, model, devices, kernels)
    check_weights(config.speculation.draft_model, "speculation.source")
    return engine


def _built_engine(
    config: RunConfig,
    model: ModelConfig,
    devices: Sequence[Device],
    kernels: Kernels | None = None,
) -> RolloutEngine:
    check_lengths(config, model)
    check_vocabulary_options(config, model)
    mesh = factored_mesh(devices)
    chain, dropped = layout_chain(mesh, model, kernels)
    for reason in dropped:
        log.info("layout dropped: %s", reason)
    layouts = wanted_layouts(config, chain, mesh, model)
    check_batch(config, layouts)
    has_tokenizer = config.data.is_arithmetic or is_checkpoint(config.model)
    eos_ids = checked_tokenizer(config, model).eos_ids if has_tokenizer else (0,)
    policy = Policy.from_config(model)
    drafts = _drafts(config, policy, devices)
    alone = _alone(config, policy, devices, layouts, resident=(), drafter=drafts.drafter)
    without_memory = layouts_without_memory(alone, config.rollout)
    for split, reason in without_memory.items():
        log.info("layout dropped: %s: %s", split, reason)
    kept = {split: layout for split, layout in layouts.items() if split not in without_memory}
    return _engine(config, policy, devices, kept, eos_ids, resident=(), drafts=drafts)


def _drafts(config: RunConfig, policy: Policy, devices: Sequence[Device]) -> DraftChoice:
    platform, longest = devices[0].platform, config.rollout.max_length
    return wanted_drafts(config.speculation, policy, platform, longest, folder=config.model)


def checked_tokenizer(config: RunConfig, model: ModelConfig) -> Tokenizer:
    """Raises UserError where it has tokens that the model has not."""
    tokenizer = load_tokenizer(config)
    check_vocabulary(tokenizer, model.vocab_size, source=config.model)
    return tokenizer


def _engine(
    config: RunConfig,
    policy: Policy,
    devices: Sequence[Device],
    layouts: dict[Split, Layout],
    eos_ids: Sequence[int],
    resident: object,
    *,
    drafts: DraftChoice,
) -> RolloutEngine:
    dtype, limit = DTYPES[config.compute_dtype], cache_limit(config.rollout, devices)
    draft = drafts.policy and DraftSource(
        drafts.policy,
        partial(_load_drafter, config.speculation.draft_model, drafts.policy),
    )
    policy = rollout_policy(config, policy)
    room = kv_bytes(
        policy,
        layouts,
        config.rollout,
        dtype,
        limit=limit,
        resident=resident,
        drafter=drafts.drafter,
    )
    return RolloutEngine(
        policy,
        devices,
        config.rollout,
        capacity=most_at_once(policy, layouts, config.rollout, dtype, devices),
        eos_ids=eos_ids,
        dtype=dtype,
        layouts=layouts,
        kv_bytes=room,
        drafts=drafts.drafts,
        draft=draft,
        drafting=drafts.reason,
        # Which programs there are would depend on the clock, or differ from one process to another.
        by_need=config.rollout.compile != "all"
        and not config.deterministic
        and company().count == 1,
    )


def _load_drafter(name: str, policy: Policy, shardings: Params, dtype: jnp.dtype) -> Params:
    return load_params(
        local_checkpoint(name, option="speculation.source"), policy, shardings, dtype
    )


def _alone(
    config: RunConfig,
    policy: Policy,
    devices: Sequence[Device],
    layouts: dict[Split, Layout],
    resident: object,
    drafter: Drafter,
) -> MemoryModel:
    """What each layout takes of a device alone; one that a rollout may start in has to fit."""
    dtype, limit = DTYPES[config.compute_dtype], memory_limit(config.rollout, devices)
    policy = rollout_policy(config, policy)
    memory = memory_alone(
        policy, layouts, config.rollout, dtype, limit=limit, resident=resident, drafter=drafter
    )
    starts = list(layouts) if config.is_planned else list(layouts)[:1]
    name = "switch_to" if config.switch_to else "layout"
    check_memory(memory, starts, f"option --{name} is {getattr(config, name)!r}")
    return memory


def model_config(config: RunConfig, devices: Sequence[Device]) -> ModelConfig:
    """The shape of the model, padded so that the devices have the layouts that may be asked for.

    Raises:
      UserError: `config.model` is neither a usable checkpoint directory nor a built-in shape.
    """
    if shape := checkpoint_shape(config.model, "model"):
        model = shape
    elif os.sep in config.model:
        raise UserError(
            f"option --model is {config.model!r}: expected a Hugging Face checkpoint directory or "
            "the name of a built-in shape, but there is no such directory."
        )
    elif config.data.is_arithmetic:
        model = preset(config.model, vocab_size=load_tokenizer(config).vocab_size)
    else:
        model = preset(config.model)
    names = config.switch_to or (config.layout if config.layout != "auto" else "")
    return padded_for(devices, model, [int(n) for n in re.findall(r"tp(\d+)", names)])


def settled_options(
    config: Options, model: ModelConfig, devices: Sequence[Device]
) -> tuple[Options, str]:
    """The options with what this model and these devices bring where nothing is written; see `settled`."""
    context, platform = model.max_position, devices[0].platform
    return settled(config, KnownModel(config.model, is_checkpoint(config.model), context, platform))


def profile_subject(config: RunConfig, model: ModelConfig, devices: Sequence[Device]) -> Subject:
    return Subject(
        backend=devices[0].platform,
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        # Padding of heads takes less than what a profile is corrected by, and a pinned layout has none.
        model={k: v for k, v in asdict(model).items() if k != "query_multiple"},
        dtype=config.compute_dtype,
        weights=config.rollout.weights,
        jax=jax.__version__,
    )


def find_profile(config: RunConfig, subject: Subject) -> Profile | None:
    """The profile to plan by, of those that are there."""
    if config.profile == "none":
        return None
    if config.profile != "auto":
        return company().agree("profile", lambda: load_profile(Path(config.profile), subject))
    return company().agree("profile", lambda: _profile_of(subject))


def _profile_of(subject: Subject) -> Profile | None:
    """That of this machine, if it was measured."""
    paths = [folder / subject.file_name for folder in (PROFILE_DIR, KEPT_DIR)]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    try:
        return load_profile(path, subject)
    except ProfileError as error:  # the user did not ask for this profile
        log.warning("not used: %s", error)
        return None
