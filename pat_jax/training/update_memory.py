"""Device memory of the update and the transfer, read from their compiled programs.

Knows the trainer's programs and the arrays that stay on the devices. Does not know the memory of a
rollout: its weights and its KV cache are freed during updates (`engine/sizing/memory.py`).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.config.compute import MemoryOptions
from pat_jax.config.optimizer import OptimizerState
from pat_jax.config.role_table import REFERENCE
from pat_jax.layout.layout import shard_bytes
from pat_jax.planning.memory import USABLE, gib
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.training.roles import Roles
from pat_jax.training.trainer import POLICY, Trainer

log = logging.getLogger(__name__)
STEP = "the optimizer's step"
OTHER_DRAFTS = "make no drafts that a model generates (--speculation.source suffix)"


@dataclass(frozen=True)
class Stage:
    """One program of the update, and the memory of a device that is taken while it runs."""

    name: str
    held: int  # bytes: training state, drafter, and the summed gradients
    taken: int  # bytes: temporaries, and results that do not reuse an argument's buffer
    has_rows: bool = True  # whether it runs on a micro-batch, and takes less for a smaller one
    drafts: int = 0  # bytes of `held` for a draft model or the early-exit head's state

    @property
    def total(self) -> int:
        return self.held + self.taken

    def __str__(self) -> str:
        return (
            f"{self.name}: {gib(self.total)} of a device, {gib(self.taken)} of them while it runs"
        )


def update_stages(roles: Roles) -> list[Stage]:
    """Returns a stage for each program of an update, thus for each micro-batch shape.

    The list is empty if the backend does not report memory."""
    resting, drafts = resting_bytes(roles.policy), _draft_bytes(roles.policy)
    of_trained = [
        replace(stage, name=f"{stage.name}{_whose(role)}")
        for role in roles.trained
        for stage in stages_of(role, _taken(role.programs))
    ]
    home = roles.policy.layout.devices
    of_readers = []
    for name, reader in roles.readers.items():
        held = resting
        if reader.devices != home:
            held = shard_bytes(roles.resident_on(reader.devices))
            drafts = 0
        held += shard_bytes(reader.visiting)
        of_readers += [
            Stage(f"{_name(key)} by the {name}", held, size, drafts=drafts)
            for key, size in _taken(reader.programs).items()
        ]
    return of_trained + of_readers


def _whose(role: Trainer) -> str:
    """Returns the words that name a role in messages; empty for the policy."""
    return "" if role.name == POLICY else f" of the {role.name}"


def _taken(programs: ProgramTable) -> dict[Key, int]:
    """Returns the bytes that each program takes besides its arguments, where they are reported."""
    taken = {key: programs.bytes_taken(key) for key in programs}
    return {key: size for key, size in taken.items() if size is not None}


def stages_of(trainer: Trainer, taken: Mapping[Key, int]) -> list[Stage]:
    """Returns the stages of a trained role's update.

    Args:
      taken: bytes that each program takes besides its arguments, such as for its own gradients.
    """
    state, drafts = resident_bytes(trainer), _draft_bytes(trainer)
    gradients = shard_bytes(trainer.trained.abstract_gradients)
    in_step = state + gradients + fetched_bytes(trainer)
    resting = resting_bytes(trainer)
    held = {"predict": state, "transfer": resting, "apply": in_step, "supervised_apply": in_step}
    return [
        Stage(name, held.get(key.name, state + gradients), size, key.rows > 0, drafts)
        for key, size in taken.items()
        if (name := _name(key))
    ]


def fetched_bytes(trainer: Trainer) -> int:
    """Returns the bytes of a device that moments take which are there only in an optimizer step."""
    return shard_bytes(trainer.placement.offloaded(trainer.state_in_a_step))


def resident_bytes(trainer: Trainer) -> int:
    """Returns the bytes of a device that are taken in every program of an update."""
    return shard_bytes([*trainer.held, *_before(trainer)])


def resting_bytes(trainer: Trainer) -> int:
    """Returns the bytes of a device that are taken before and after an update's steps."""
    return shard_bytes([*trainer.resident, trainer.beside.in_updates, *_before(trainer)])


def _before(trainer: Trainer) -> list[Any]:
    """Returns the shapes of the copy of the adapters before an update, for `update_seen`."""
    return [trainer.abstract_params] if trainer.tells_seen else []


def _draft_bytes(trainer: Trainer) -> int:
    return shard_bytes([trainer.beside.always, trainer.beside.in_updates])


def _name(key: Key) -> str | None:
    """Returns a program's name in messages, or None if its memory needs no check."""
    shape = f"{key.rows} x {key.length} tokens"
    return {
        "grad": f"gradients of {shape}",
        "supervised_grad": f"supervised gradients of {shape}",
        "predict": f"predictions of {shape}",
        "apply": STEP,
        "supervised_apply": "the optimizer's supervised step",
        "transfer": f"the transfer to {key.target}",
    }.get(key.name)


def check_state(roles: Roles, limit: float) -> None:
    """Checks, before anything is compiled, that a device has the least memory that an update needs.
    Raises UserError if it has less."""
    if lacking := lacking_state(roles, limit):
        raise UserError(lacking)


def lacking_state(roles: Roles, limit: float) -> str:
    """Returns a message if a device has less memory than any update needs, else ""."""
    keeps_reference = REFERENCE in roles.readers
    every = (_lacking(role, limit, keeps_reference=keeps_reference) for role in roles.trained)
    return next(filter(None, every), "")


def _lacking(trainer: Trainer, limit: float, *, keeps_reference: bool) -> str:
    state, drafts = resident_bytes(trainer), _draft_bytes(trainer)
    gradients = shard_bytes(trainer.trained.abstract_gradients)
    fetched = fetched_bytes(trainer)
    passes = 2 * gradients, f"gradients twice {gib(gradients)}, activations not counted"
    step = gradients + fetched, f"gradients {gib(gradients)}, moments in a step {gib(fetched)}"
    more, of_what = max(passes, step)
    if state + more <= limit:
        return ""
    return (
        f"the update{_whose(trainer)} needs more than {gib(state + more)} of a device (training state "
        f"{gib(state - drafts)}{_drafts_words(drafts)}, {of_what}), but it has {gib(limit)}; use more "
        f"devices, which divide all of these{' but the drafts' * bool(drafts)}"
        f"{', or --algorithm.beta 0, which keeps no reference' * keeps_reference}"
        f"{f', or {OTHER_DRAFTS}' * bool(drafts)}."
    )


def check_update(stages: Sequence[Stage], limit: float, options: MemoryOptions) -> str:
    """Returns a description of the program that takes the most memory. Raises UserError if a device
    has less memory than this program takes."""
    if not stages:
        return "the update no figure: this backend does not say what its programs take"
    most = largest(stages)
    log.info("memory of the update, its largest program: %s", most)
    if lacking := shortage(most, limit, options):
        raise UserError(lacking)
    if notice := tightness(most, limit, options):
        log.warning("%s", notice)
    return str(most)


def largest(stages: Sequence[Stage]) -> Stage:
    return max(stages, key=lambda stage: stage.total)


def shortage(stage: Stage, limit: float, options: MemoryOptions, *, is_least: bool = False) -> str:
    """Returns a message if a device has too little memory for a stage, with advice; else "".

    Args:
      limit: bytes of a device.
      is_least: whether the program takes at least, not exactly, the memory in `stage`.
    """
    if stage.total <= limit:
        return ""
    return (
        f"the update needs {'at least ' * is_least}{gib(stage.total)} of a device for {stage.name} (training state and "
        f"gradients {gib(stage.held - stage.drafts)}{_drafts_words(stage.drafts)}, activations and other temporaries "
        f"{gib(stage.taken)}), but it has {gib(limit)}; {', or '.join(_advice(stage, options))}."
    )


def tightness(stage: Stage, limit: float, options: MemoryOptions) -> str:
    """Returns a warning if a device has hardly more memory than the stage takes, else ""."""
    if stage.total <= USABLE * limit:
        return ""
    return (
        f"the update takes {gib(stage.total)} of a device's {gib(limit)}: it may find no room where "
        f"memory is in pieces; {', or '.join(_advice(stage, options))}"
    )


def _drafts_words(drafts: int) -> str:
    return f", drafts {gib(drafts)}" if drafts else ""


def _advice(stage: Stage, options: MemoryOptions) -> Iterator[str]:
    """Yields advice that saves memory, first for the larger of the stage's two parts."""
    of_rows = list(_smaller_rows(options)) if stage.has_rows else []
    of_state = [] if options.trains_adapters else list(_smaller_state(stage, options.optimizer))
    yield from of_state + of_rows if stage.held > stage.taken else of_rows + of_state
    if stage.drafts:
        yield OTHER_DRAFTS
    yield "use more devices"


def _smaller_rows(options: MemoryOptions) -> Iterator[str]:
    compute = options.compute
    if compute.remat != "full":
        yield "take --remat full, which keeps the least of a layer"
    if compute.dtype == "float32":
        yield "take --compute_dtype bfloat16"
    if options.micro_batch:
        yield f"lower {options.micro_batch}, down to one row for each device"
    yield f"allow shorter {options.learned_from}"


def _smaller_state(stage: Stage, optimizer: OptimizerState) -> Iterator[str]:
    if not optimizer.offload and not stage.name.startswith(
        STEP
    ):  # in the step, moments are on the device
        yield "take --optimizer.offload true, which keeps moments in the host's memory"
    if optimizer.moment_dtype == "float32":
        yield "take --optimizer.moment_dtype bfloat16"
    if optimizer.weight_dtype == "float32":
        yield "take --optimizer.weight_dtype bfloat16"
