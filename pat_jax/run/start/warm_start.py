"""The supervised stage before reinforcement learning: demonstrations of a built-in task.

Knows batches of demonstrations and when the stage is over. Does not know how a step is computed.
"""

import itertools
import time
from collections.abc import Iterator, Sequence

import numpy as np

from pat_jax.config.run import RunConfig
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.batches import MicroBatch, to_supervised_batch
from pat_jax.rl.batches.packing import single_passes
from pat_jax.run.logging.progress import Progress
from pat_jax.run.setup import Setup
from pat_jax.run.task import Task
from pat_jax.training.build import micro_shapes


def warm_start(
    config: RunConfig, setup: Setup, state: TrainState, progress: Progress
) -> TrainState:
    """The policy after the stage; the optimizer of the reinforcement stage starts afresh.

    Args:
      state: of the supervised optimizer's beginning; its buffers are given up.
    """
    if not (steps := config.warm_start.steps):
        return state
    start, trainer = time.perf_counter(), setup.trainer
    shapes = micro_shapes(config, trainer.layout.split.dp, trainer.layout.platform)
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
    """Batches of demonstrations, as many as one micro-batch holds."""
    size = config.warm_start.batch_size
    assert task.demonstrations is not None  # check_task refuses a warm start without
    for draw in itertools.count():
        shown = task.demonstrations(draw, 8 * size)
        lengths = [len(prompt) + len(response) for prompt, response in shown]
        batches = single_passes(lengths, shapes[-1], max_examples=size)
        for i in np.random.default_rng((config.seed, draw)).permutation(len(batches)):
            yield to_supervised_batch([shown[n] for n in batches[i]], micro_shapes=shapes)
