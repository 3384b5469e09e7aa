"""Builds the parts of a run that learns from files. All mistakes in options and files are found
here, before anything is compiled or written."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.common.hub import is_checkpoint
from pat_jax.config.by_model import settled_examples
from pat_jax.config.compute import Remat
from pat_jax.config.fine_tuning import FineTuning
from pat_jax.config.role_table import tuned_roles
from pat_jax.engine.sizing.device_memory import cache_limit, memory_limit
from pat_jax.engine.warm_up.kernel_check import with_usable_kernels
from pat_jax.layout.chain import least_tp
from pat_jax.layout.layout import Layout
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.rl.batches.packing import Shape
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.data.examples import Examples
from pat_jax.run.files.folder import check_resumed
from pat_jax.run.roles.fingerprint import identity
from pat_jax.run.roles.weights import check_weights
from pat_jax.run.sft.inputs import shape_of_model
from pat_jax.run.sft.lessons import REFERENCE, Lessons
from pat_jax.run.sft.reading import kind_of, read_lessons
from pat_jax.training.build import DTYPES, build_lora, row_shapes
from pat_jax.training.build_roles import Losses, build_roles
from pat_jax.training.remat_choice import settled_remat
from pat_jax.training.role_model import RoleModel, with_free_memory
from pat_jax.training.roles import Roles
from pat_jax.training.state_placement import check_offload
from pat_jax.training.trainer import Trainer
from pat_jax.training.transfer import Receivers
from pat_jax.training.update_memory import check_state

Config = TypeVar("Config", bound=FineTuning)


@dataclass(frozen=True)
class SftSetup:
    """The parts of a run, before anything is compiled."""

    config: FineTuning  # every `auto` settled
    policy: Policy
    roles: Roles
    devices: Sequence[Device]
    lessons: Lessons
    heldout: TrainBatch | None  # packed held-out data; None: no evaluation
    shapes: Sequence[Shape]  # of micro-batches
    steps: int
    note: str  # for the user: how much data, how much was left out, what was shortened
    fingerprint: Mapping[str, object]  # a checkpoint must have the same to be resumed
    memory: float  # bytes of a device's memory

    @property
    def trainer(self) -> Trainer:
        return self.roles.policy

    @property
    def examples(self) -> Examples[Any]:
        return self.lessons.train


def build(config: FineTuning, devices: Sequence[Device]) -> SftSetup:
    """Builds all parts of a run. Raises UserError if anything in the configuration or its files
    cannot work. Cheap checks come first: options, headers of files. Then come the tokenizer and the
    examples, which take seconds. Weights, which may have to be downloaded, come last."""
    config, model, shortened = _settled(config, devices)
    policy = Policy.from_config(model)
    kind = {"learns_from": kind_of(config).KIND}
    lora = identity(build_lora(config.lora, policy))
    fingerprint = check_resumed(config, {**asdict(model), **kind, **lora})
    check_offload(config.optimizer, devices)
    lessons = read_lessons(config, model)
    steps = config.steps or math.ceil(
        config.epochs * lessons.train.batches_per_epoch(config.batch_size)
    )
    _check_warmup(config.optimizer.warmup_steps, steps)
    memory = memory_limit(config.device_memory_gib, devices)
    dtype = DTYPES[config.compute_dtype]
    layout = least_tp(devices, policy.config, fsdp_size=config.fsdp_size)
    budget = config.tokens_per_micro_batch
    shapes = row_shapes(config.max_length, budget, layout.split.dp, lessons.TEXTS)
    rows = tuned_roles(config, lessons.HEAD, steps, has_reference=REFERENCE in lessons.loss.needs)

    def roles_in(layout: Layout, remat: Remat = "auto") -> Roles:
        models = [RoleModel(row.with_remat(remat), policy, layout) for row in rows]
        models = with_free_memory(models, memory)
        return build_roles(models, Losses(lessons.loss), shapes, Receivers(dtype))

    roles = roles_in(layout)
    check_state(roles, memory)
    limit = cache_limit(config.device_memory_gib, devices)
    remat, recomputed = settled_remat(config.remat, roles, limit)
    config = replace(config, remat=remat)
    usable = with_usable_kernels(layout, policy.config, page_size=16, dtype=dtype)
    roles = roles_in(usable, remat)
    check_weights(config.model, head=lessons.HEAD)
    return SftSetup(
        config,
        policy,
        roles,
        devices,
        lessons,
        lessons.batch(lessons.heldout, shapes) if lessons.heldout else None,
        shapes,
        steps,
        "\n".join(filter(None, [shortened, lessons.note, recomputed])),
        fingerprint,
        memory,
    )


def _settled(config: Config, devices: Sequence[Device]) -> tuple[Config, ModelConfig, str]:
    """Returns the options with every `auto` settled, the model's shape, and the note of
    `settled_examples`."""
    has_weights = is_checkpoint(config.model)
    model = trained_shape(config, devices)
    config.lora.check_base(config.model)
    if not config.data.files:
        expected = kind_of(config).FILES
        raise UserError(f"option --data is not given: expected {expected}; give one or several.")
    platform = devices[0].platform
    config, note = settled_examples(config, model.max_position, platform, is_checkpoint=has_weights)
    if config.max_length > model.max_position:
        raise UserError(
            f"option --max_length is {config.max_length}: expected at most the {model.max_position} "
            f"tokens of the context of {config.model!r} (max_position_embeddings in its config.json); "
            f"take --max_length {model.max_position}."
        )
    return config, model, note


def trained_shape(config: FineTuning, devices: Sequence[Device]) -> ModelConfig:
    """Returns the shape of the trained model, padded so that it divides over the devices."""
    model = shape_of_model(config.model, kind_of(config).HEAD)
    return replace(model, vocab_multiple=math.lcm(model.vocab_multiple, len(devices)))


def _check_warmup(warmup: int, steps: int) -> None:
    """Raises UserError if the run ends before a learning rate reaches its peak."""
    if warmup > steps:
        raise UserError(
            f"option --optimizer.warmup_steps is {warmup}: expected at most the {steps:,} optimizer "
            "steps of the run; take fewer, or more --epochs or --steps."
        )
