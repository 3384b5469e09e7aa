"""The initial state of a run: from its newest checkpoint, or from an untrained policy.

Knows checkpoints and the supervised stage before reinforcement learning. Does not know the loop
that follows (`loop.py`), nor how a step is computed.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.config.run import RunConfig
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.batches import to_supervised_batch
from pat_jax.rl.batches.packing import single_passes
from pat_jax.rl.batches.train_batch import MicroBatch
from pat_jax.run.checkpoints.json_state import declared
from pat_jax.run.logging.progress import Progress
from pat_jax.run.process.open_run import OpenRun, Restored
from pat_jax.run.roles.adapters import check_base, freeze_base, initial_params
from pat_jax.run.roles.critic import CRITIC_BASE, check_critic_base, freeze_critic, initial_critic
from pat_jax.run.roles.reference import begin_reference, resume_reference
from pat_jax.run.roles.teacher import load_teacher
from pat_jax.run.start.setup import Setup
from pat_jax.run.start.shaping import Shaping
from pat_jax.run.start.task import Task
from pat_jax.run.start.totals import Totals
from pat_jax.training.roles import States

_OTHER_PROBLEMS = {
    "train": "resumed with other problems than before, or in another order (the files of --data or how "
    "they are read): some come twice in this epoch, and some not at all",
    "heldout": "resumed with other held-out problems than before (the files, or how many): evaluations "
    "from here on are not those before",
}


@dataclass(frozen=True)
class Beginning:
    steps_done: int
    states: States
    lengths: LengthModel
    totals: Totals
    base_checksums: Mapping[str, int | None]  # see `_freeze_bases`
    shaping: Shaping


def begin(config: RunConfig, setup: Setup, run: OpenRun) -> Beginning:
    """Returns the initial state of a run. For a resumed run, raises UserError if every checkpoint
    is damaged, or if its adapters belong to another base."""
    checksums = _freeze_bases(config, setup)
    load_teacher(setup.roles, config)
    trainer = setup.trainer
    if (found := run.restore(setup.roles.abstract_states)) is not None:
        resume_reference(setup.roles, config.run_dir, found[0])
        return _resumed(config, setup, run, found, checksums)
    state = trainer["init_state"](initial_params(trainer, config))
    state = _warm_start(config, setup, state, run.progress)
    begin_reference(setup.roles, config.run_dir, state)
    states = initial_critic(setup.roles, config, setup.critic, state) | {trainer.name: state}
    lengths = LengthModel.empty(config.rollout.max_completion_length)
    shaping = Shaping.of(config.algorithm, {})
    return Beginning(0, states, lengths, Totals(), checksums, shaping)


def _freeze_bases(config: RunConfig, setup: Setup) -> Mapping[str, int | None]:
    """Loads the bases of adapters. Returns the checksum of each by its name in a checkpoint's
    metadata; None: the whole model is trained."""
    of_policy = {"base_checksum": freeze_base(setup.trainer, config)}
    if setup.critic is None:
        return of_policy
    return of_policy | {CRITIC_BASE: freeze_critic(setup.roles, config, setup.critic)}


def _resumed(
    config: RunConfig,
    setup: Setup,
    run: OpenRun,
    found: Restored,
    checksums: Mapping[str, int | None],
) -> Beginning:
    step, saved, meta = found
    check_base(meta, checksums["base_checksum"], config)
    check_critic_base(meta, checksums.get(CRITIC_BASE), config)
    with run.checkpoints.as_written(step):
        before = meta.get("problems", {})  # checkpoints of earlier versions do not have it
        for name, checksum in setup.task.checksums.items():
            if before.get(name, checksum) != checksum:
                run.progress.print(_OTHER_PROBLEMS[name])
        lengths = LengthModel.from_json(meta["lengths"])
        lengths = lengths.with_cap(config.rollout.max_completion_length)
        size = config.rollout.prompts_per_step
        totals = declared(Totals.from_json(meta, step, size, setup.task.train.after))
        shaping = declared(Shaping.of(config.algorithm, meta))
    return Beginning(step, saved, lengths, totals, checksums, shaping)


def _warm_start(
    config: RunConfig, setup: Setup, state: TrainState, progress: Progress
) -> TrainState:
    """Returns the state after the supervised stage, which trains on demonstrations of a built-in
    task. The optimizer starts afresh. The buffers of `state` are donated."""
    if not (steps := config.warm_start.steps):
        return state
    start, trainer = time.perf_counter(), setup.trainer
    shapes = setup.roles.micro_shapes
    for step, shown in zip(range(steps), _batches(config, setup.task, shapes), strict=False):
        state, result = trainer.supervised_step(state, shown)
        loss = result.metrics["train/cross_entropy"]
        progress.stage(f"warm start {step + 1}/{steps} loss {loss:.3f}")
    seconds = time.perf_counter() - start
    progress.print(f"warm start: {steps} supervised steps in {seconds:.1f} s")
    return trainer["init_state"](state.params)


def _batches(
    config: RunConfig, task: Task, shapes: Sequence[tuple[int, int]]
) -> Iterator[Sequence[MicroBatch]]:
    """Yields batches of demonstrations without end, each of at most one micro-batch."""
    size = config.warm_start.batch_size
    assert task.demonstrations is not None  # check_task refuses a warm start without
    for draw in itertools.count():
        shown = task.demonstrations(draw, 8 * size)
        lengths = [len(prompt) + len(response) for prompt, response in shown]
        batches = single_passes(lengths, shapes[-1], max_examples=size)
        for i in np.random.default_rng((config.seed, draw)).permutation(len(batches)):
            yield to_supervised_batch([shown[n] for n in batches[i]], micro_shapes=shapes)
