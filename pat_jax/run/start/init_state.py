"""The initial state of a run: from its newest checkpoint, or from an untrained policy.

Knows checkpoints and the supervised stage before reinforcement learning. Does not know the loop
that follows (`loop.py`), nor how a step is computed.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.config.learning import DEMONSTRATIONS
from pat_jax.config.role_table import POLICY
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.batches import to_supervised_batch
from pat_jax.rl.batches.packing import Shape, single_passes
from pat_jax.rl.batches.train_batch import MicroBatch
from pat_jax.run.logging.progress import Progress
from pat_jax.run.process.open_run import OpenRun, Restored
from pat_jax.run.roles.fingerprint import check_bases
from pat_jax.run.roles.role_params import (
    begin_reference,
    freeze_bases,
    initial_params,
    initial_states,
    load_frozen,
    resume_reference,
)
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
    base_checksums: Mapping[str, int | None]  # see `freeze_bases`
    shaping: Shaping


def begin(setup: Setup, run: OpenRun) -> Beginning:
    """Returns the initial state of a run. For a resumed run, raises UserError if every checkpoint
    is damaged, or if its adapters belong to another base."""
    config = setup.config
    roles = setup.roles
    trainer = setup.trainer
    seed = config.seed
    checksums = freeze_bases(roles, seed)
    load_frozen(roles)
    if (found := run.restore(roles.abstract_states)) is not None:
        resume_reference(roles, config.run_dir, found[0])
        return _resumed(setup, run, found, checksums)
    state = trainer["init_state"](initial_params(roles.models[POLICY], trainer, seed))
    state = _warm_start(setup, state, run.progress)
    begin_reference(roles, config.run_dir, state)
    states = initial_states(roles, state, seed)
    lengths = LengthModel.empty(config.rollout.max_completion_length)
    shaping = Shaping.of(config.algorithm, {})
    return Beginning(0, states, lengths, Totals(), checksums, shaping)


def _resumed(
    setup: Setup,
    run: OpenRun,
    found: Restored,
    checksums: Mapping[str, int | None],
) -> Beginning:
    config = setup.config
    step, saved, meta = found
    check_bases(meta, checksums, config.run_dir, setup.roles.models, config.seed)
    with run.checkpoints.as_written(step):
        for name, checksum in setup.task.checksums.items():
            if meta["problems"].get(name) != checksum:
                run.progress.print(_OTHER_PROBLEMS[name])
        lengths = LengthModel.from_json(meta["lengths"])
        lengths = lengths.with_cap(config.rollout.max_completion_length)
        totals = Totals.from_json(meta)
        shaping = Shaping.of(config.algorithm, meta)
    return Beginning(step, saved, lengths, totals, checksums, shaping)


def _warm_start(setup: Setup, state: TrainState, progress: Progress) -> TrainState:
    """Returns the state after the supervised stage, which trains on demonstrations of a built-in
    task. The optimizer's moments are reset. The buffers of `state` are donated."""
    if not (steps := setup.config.warm_start.steps):
        return state
    start = time.perf_counter()
    trainer = setup.trainer
    batches = _batches(setup.task, setup.roles.micro_shapes, setup.config.seed)
    for step, shown in zip(range(steps), batches, strict=False):
        state, result = trainer.supervised_step(state, shown)
        loss = result.metrics["train/cross_entropy"]
        progress.stage(f"warm start {step + 1}/{steps} loss {loss:.3f}")
    seconds = time.perf_counter() - start
    progress.print(f"warm start: {steps} supervised steps in {seconds:.1f} s")
    return trainer["init_state"](state.params)


def _batches(task: Task, shapes: Sequence[Shape], seed: int) -> Iterator[Sequence[MicroBatch]]:
    """Yields batches of demonstrations without end, each of at most one micro-batch."""
    assert task.demonstrations is not None  # check_task refuses a warm start without
    for draw in itertools.count():
        shown = task.demonstrations(draw, 8 * DEMONSTRATIONS)
        lengths = [len(prompt) + len(response) for prompt, response in shown]
        batches = single_passes(lengths, shapes[-1], max_examples=DEMONSTRATIONS)
        for i in np.random.default_rng((seed, draw)).permutation(len(batches)):
            yield to_supervised_batch([shown[n] for n in batches[i]], micro_shapes=shapes)
