"""The threads that run models on devices which do no rollouts.

Two threads must not give programs to one device. So the roles whose devices overlap are one lane,
and during a rollout each lane has a thread of its own. Knows roles and devices. Does not know which
responses there are (`early_columns.py`, `early_gradients.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pat_jax.common.hosts.lane_thread import LaneThread
from pat_jax.config.run import RunConfig
from pat_jax.rl.batches.batches import to_read_batch
from pat_jax.rl.batches.packing import Shape, fills
from pat_jax.rl.batches.types import Rollout
from pat_jax.run.early_columns import Lane
from pat_jax.run.early_gradients import TrainedLane
from pat_jax.run.process.stop_signals import Stopped
from pat_jax.run.setup import Setup
from pat_jax.training.roles import Prediction, Roles, States


@dataclass
class Lanes:
    """What runs beside the rollouts of a run."""

    readers: list[Lane] = field(default_factory=list)
    trained: list[TrainedLane] = field(default_factory=list)  # whose gradients are summed early
    late: LaneThread | None = None  # of whole updates; None: none goes on beside rollouts


@contextmanager
def open_lanes(config: RunConfig, setup: Setup, states: Callable[[], States]) -> Iterator[Lanes]:
    """Yields the lanes of a run, and gives each reward model the thread of its lane.

    There are none if all models share the rollouts' devices, with `--placement.overlap none`, and
    with `--deterministic`: what is read together would depend on the clock.

    Args:
      states: returns the present states of trained roles.
    """
    lanes = Lanes()
    if config.placement.overlap == "none" or config.deterministic:
        yield lanes
        return
    rollout = frozenset(setup.engine.mesh.devices.flat)
    readers = [x for x in setup.roles.predictions(states) if x.is_column]
    judges = [(one.reader.devices, one) for one in setup.reward_models.values()]
    trained = [(role.layout.devices, role) for role in setup.roles.trained]
    # What an update needs once all columns are there.
    late = frozenset().union(*(place for place, _ in trained if config.placement.lag))
    if config.placement.overlap != "gradients" or not config.train:
        trained = []
    every = [*(x.devices for x in readers), *(place for place, _ in (*judges, *trained))]
    places = [place for place in (*every, late) if place and not place & rollout]
    opened: list[LaneThread] = []
    with ExitStack() as threads:
        for number, group in enumerate(_joined(places)):
            thread = threads.enter_context(LaneThread(f"lane{number}"))
            opened.append(thread)
            for place, judge in judges:
                if place <= group:
                    judge.scores.score_on(thread)
                    threads.callback(judge.scores.score_on, None)
            if reads := [x for x in readers if x.devices <= group]:
                read = partial(predicted, reads, setup.roles.micro_shapes)
                lanes.readers.append(Lane(thread, read, partial(_fill, setup.roles)))
            if roles := [role for place, role in trained if place <= group]:
                lanes.trained.append(TrainedLane(thread, roles))
            if late and late <= group:
                lanes.late = thread
        try:
            yield lanes
        except Stopped:  # in every process at the same point: what one has begun all complete
            _finish(opened)
            raise
        _finish(opened)


def _finish(threads: Sequence[LaneThread]) -> None:
    for thread in threads:
        thread.finish()


def predicted(
    reads: Sequence[Prediction],
    micro_shapes: Sequence[Shape],
    rollouts: Sequence[Rollout],
    *,
    shares_prompts: bool = False,
) -> dict[str, list[np.ndarray]]:
    """Returns the columns of some responses, by name."""
    batch = to_read_batch(rollouts, micro_shapes, shares_prompts=shares_prompts)
    for one in reads:
        batch = one.added_to(batch)
    return {one.column: batch.by_response(one.column) for one in reads}


def _fill(roles: Roles, rollouts: Sequence[Rollout]) -> bool:
    return fills([length_of(one) for one in rollouts], roles.micro_shapes)


def length_of(one: Rollout) -> int:
    """Returns the tokens of a prompt and its response."""
    return len(one.prompt.tokens) + len(one.tokens)


def _joined(places: Sequence[frozenset]) -> list[frozenset]:
    """Returns the unions of places that overlap, directly or by others."""
    groups: list[frozenset] = []
    for place in places:
        apart = [group for group in groups if not group & place]
        groups = [*apart, place.union(*(group for group in groups if group & place))]
    return groups
