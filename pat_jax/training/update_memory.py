"""What the update and the transfer take of a device, read off their compiled programs.

Knows the trainer's programs and what lies beside them. Does not know what a rollout takes: its
weights and its KV cache are gone while these run (`engine/memory.py`).
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pat_jax.common.errors import UserError
from pat_jax.engine.device.programs import Key
from pat_jax.engine.memory import gib, shard_bytes
from pat_jax.planning.memory import USABLE
from pat_jax.training.trainer import Trainer

log = logging.getLogger(__name__)


class UpdateOptions(Protocol):
    """What a run can change where its update does not fit."""

    @property
    def remat(self) -> bool: ...

    @property
    def compute_dtype(self) -> str: ...

    @property
    def micro_batch_option(self) -> str: ...

    @property
    def learned_from(self) -> str: ...


@dataclass(frozen=True)
class Stage:
    """One program of the update, and what lies on a device while it runs."""

    name: str
    held: int  # bytes: training state, and the gradients that are added up
    taken: int  # bytes: temporaries, and results that take no argument's place

    @property
    def total(self) -> int:
        return self.held + self.taken

    def __str__(self) -> str:
        return (
            f"{self.name}: {gib(self.total)} of a device, {gib(self.taken)} of them while it runs"
        )


def update_stages(trainer: Trainer) -> list[Stage]:
    """Those of a step, each micro-batch shape by itself; none where the backend does not tell.

    The gradients of a micro-batch are there beside those that they are added to.
    """
    state, gradients = shard_bytes(trainer.resident), shard_bytes(trainer.abstract_params)
    merged = shard_bytes(trainer.abstract_merged)
    held = {"logprobs": state, "merge": state, "transfer": state + merged}
    stages = []
    for key in trainer.programs:
        taken = trainer.programs.bytes_taken(key)
        if taken is not None and (name := _name(key)):
            stages.append(Stage(name, held.get(key.name, state + gradients), taken))
    return stages


def _name(key: Key) -> str | None:
    """None of programs that take next to nothing, or run once and little else is there."""
    shape = f"{key.rows} x {key.length} tokens"
    return {
        "grad": f"gradients of {shape}",
        "supervised_grad": f"supervised gradients of {shape}",
        "logprobs": f"log-probabilities of {shape}",
        "apply": "the optimizer's step",
        "supervised_apply": "the optimizer's supervised step",
        "merge": "the merge of adapters and base",
        "transfer": f"the transfer to {key.target}",
    }.get(key.name)


def check_state(trainer: Trainer, limit: float) -> None:
    """Before anything is compiled: the least that an update needs.

    Raises:
      UserError: a device has not as much.
    """
    state, gradients = shard_bytes(trainer.resident), shard_bytes(trainer.abstract_params)
    if state + 2 * gradients > limit:
        raise UserError(
            f"the update needs more than {gib(state + 2 * gradients)} of a device (training state "
            f"{gib(state)}, gradients twice {gib(gradients)}, activations not counted), but it has "
            f"{gib(limit)}; use more devices, which divide all of these"
            f"{', or --algorithm.beta 0, which keeps no reference' * trainer.has_reference}."
        )


def check_update(stages: Sequence[Stage], limit: float, config: UpdateOptions) -> str:
    """After compilation: what the largest program takes, in words, if a device has as much.

    Raises:
      UserError: it has not.
    """
    if not stages:
        return "the update no figure: this backend does not say what its programs take"
    most = max(stages, key=lambda stage: stage.total)
    log.info("memory of the update, its largest program: %s", most)
    if most.total > limit:
        raise UserError(
            f"the update needs {gib(most.total)} of a device for {most.name} (training state and "
            f"gradients {gib(most.held)}, activations and other temporaries {gib(most.taken)}), but "
            f"it has {gib(limit)}; {', or '.join(_advice(config))}."
        )
    if most.total > USABLE * limit:
        log.warning(
            "the update takes %s of a device's %s: it may find no room where memory is in pieces; %s",
            gib(most.total),
            gib(limit),
            ", or ".join(_advice(config)),
        )
    return str(most)


def _advice(config: UpdateOptions) -> Iterator[str]:
    if not config.remat:
        yield "take --remat true"
    if config.compute_dtype == "float32":
        yield "take --compute_dtype bfloat16"
    yield f"lower {config.micro_batch_option}, down to one row for each device"
    yield f"allow shorter {config.learned_from}"
    yield "use more devices"
