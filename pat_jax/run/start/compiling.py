"""Compiles the programs of a run, and prints the lines at its beginning.

Knows programs by their tables. Does not know what runs them (`loop.py`).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from pat_jax.common.hosts.together import process_group
from pat_jax.common.owners import have_all
from pat_jax.config.compute import MemoryOptions
from pat_jax.engine.sizing.memory_checks import describe_memory
from pat_jax.layout.division import padding_of_heads
from pat_jax.layout.exchange import form_of_update
from pat_jax.run.logging.banner import introduction
from pat_jax.run.logging.progress import Progress
from pat_jax.run.roles.reward_models import check_room
from pat_jax.run.start.setup import Setup
from pat_jax.training.roles import Roles
from pat_jax.training.update_memory import check_update, update_stages

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    seconds: float
    update: str  # a line on the memory that the update's largest program takes of a device


def announce(setup: Setup, progress: Progress) -> None:
    """Prints the model, devices and layouts of the run, and notes about its options."""
    config = setup.config
    notes = [setup.shortened, *setup.by_memory, setup.task.note, config.sampling_note]
    for note in filter(None, notes):
        progress.print(note)
    if padding := padding_of_heads(setup.policy.config):
        log.info("%s", padding)
    for reason in setup.dropped:
        log.info("layout dropped: %s", reason)
    for line in describe_memory(setup.memory, config.rollout):
        log.info("%s", line)
    log.info("%s", setup.engine.drafting)
    lora = setup.trainer.trained.lora
    progress.print(
        introduction(
            config.model,
            setup.policy,
            setup.devices,
            config.compute_dtype,
            config.algorithm.title if config.train else "",
            rollout_weights=config.rollout.weights,
            lora=lora,
        )
    )
    roles = {model.role.devices for model in setup.roles.models.values()}
    scoring = ["reward"] * bool(setup.reward_models)
    if places := setup.places.describe({"rollout", *roles, *scoring}):
        progress.print(places)
    layouts = ", ".join(map(str, setup.layouts))
    progress.print(f"run folder {config.run_dir}; layouts {layouts}")


def compile_run(setup: Setup, progress: Progress) -> Compiled:
    """Compiles the programs of the run in parallel. If programs are compiled as needed, compiles
    only those of the first steps. Raises UserError if the update does not fit a device."""
    start = time.perf_counter()
    is_by_need = setup.engine.by_need is not None
    models = [one.reader for one in setup.reward_models.values()]
    of_models = sum(one.to_compile(by_need=False) for one in models)
    of_roles = setup.roles.to_compile(by_need=is_by_need)
    count = of_roles + of_models + setup.engine.to_compile()
    progress.print(f"compiling {count} programs")
    # The update first: it tells early if the run does not fit.
    update = compile_update(
        setup.roles, setup.memory.limit, setup.config.memory_options, progress, by_need=is_by_need
    )
    for one in models:  # few programs, without a backward pass
        one.compile(by_need=False)
    check_room(setup.reward_models, setup.memory, setup.held_without_rollouts)
    setup.engine.compile(_show("rollout", progress))
    seconds = time.perf_counter() - start
    progress.print(f"compiled in {seconds:.1f} s")
    return Compiled(seconds, update)


def compile_update(
    roles: Roles,
    limit: float,
    options: MemoryOptions,
    progress: Progress,
    *,
    by_need: bool = False,
) -> str:
    """Compiles the programs of the roles; with `by_need`, only the first passes over micro-batches.
    Returns a line on the memory of the largest program. Raises UserError if the update does not fit
    a device, which has `limit` bytes."""
    trainer = roles.policy
    for rows, length in trainer.largest:
        layout = trainer.layout
        experts = trainer.policy.config.experts
        tokens = rows * length // layout.split.dp
        option = options.compute.experts
        if form := form_of_update(option, experts, layout, layout.platform, tokens):
            log.info("%s", form)
    roles.compile(_show("training", progress), by_need=by_need)
    stages = update_stages(roles)
    if not all(have_all(role.layout.devices) for role in roles.trained):
        found = process_group().gather("stages of an update", stages)
        stages = [*chain.from_iterable(found)]
    return check_update(stages, limit, options)


def _show(name: str, progress: Progress) -> Callable[[int, int], None]:
    return lambda done, total: progress.stage(f"compiling {name} {done}/{total}")
