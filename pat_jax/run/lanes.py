"""The threads that run models on devices which do no rollouts.

Two threads must not give programs to one device. So the roles whose devices overlap are one lane,
and during a rollout each lane has a thread of its own. Knows roles and devices. Does not know which
responses there are (`early_columns.py`, `early_gradients.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from pat_jax.common.hosts.lane_thread import LaneThread
from pat_jax.config.run import RunConfig
from pat_jax.rl.batches.batches import TrainBatch, to_read_batch
from pat_jax.rl.batches.types import Rollout
from pat_jax.run.early_columns import Lane
from pat_jax.run.early_gradients import TrainedLane
from pat_jax.run.process.stop_signals import Stopped
from pat_jax.run.setup import Setup
from pat_jax.training.roles import Roles, States

Read = Callable[[TrainBatch], TrainBatch]


@dataclass
class Lanes:
    """What runs beside the rollouts of a run."""

    readers: list[Lane] = field(default_factory=list)
    trained: list[TrainedLane] = field(default_factory=list)  # whose gradients are summed early


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
    readers = list(_readers(setup.roles, states))
    judges = [(one.reader.devices, one) for one in setup.reward_models.values()]
    trained = [(role.layout.devices, role) for role in setup.roles.trained]
    if config.placement.overlap != "gradients" or not config.train:
        trained = []
    places = [place for place, *_ in (*readers, *judges, *trained) if not place & rollout]
    opened: list[LaneThread] = []
    with ExitStack() as threads:
        for number, group in enumerate(_joined(places)):
            thread = threads.enter_context(LaneThread(f"lane{number}"))
            opened.append(thread)
            for place, judge in judges:
                if place <= group:
                    judge.scores.score_on(thread)
                    threads.callback(judge.scores.score_on, None)
            reads = {column: read for place, column, read in readers if place <= group}
            if reads:
                lanes.readers.append(Lane(thread, _predict(setup.roles, reads)))
            if roles := [role for place, role in trained if place <= group]:
                lanes.trained.append(TrainedLane(thread, roles))
        try:
            yield lanes
        except Stopped:  # in every process at the same point: what one has begun all complete
            _finish(opened)
            raise
        _finish(opened)


def _finish(threads: Sequence[LaneThread]) -> None:
    for thread in threads:
        thread.finish()


def _readers(roles: Roles, states: Callable[[], States]) -> Iterator[tuple[frozenset, str, Read]]:
    """Yields the devices, the column and the predictions of each role that reads whole batches."""
    for reader in roles.readers.values():
        if not reader.top_k:
            yield reader.devices, reader.column, reader.read
    for role in roles.trained:
        if role.predicts:
            yield (
                role.layout.devices,
                role.old,
                lambda batch, role=role: role.predict(states()[role.name], batch),
            )


def _predict(
    roles: Roles, reads: Mapping[str, Read]
) -> Callable[[Sequence[Rollout]], dict[str, list[np.ndarray]]]:
    def predict(rollouts: Sequence[Rollout]) -> dict[str, list[np.ndarray]]:
        batch = to_read_batch(rollouts, roles.micro_shapes)
        for read in reads.values():
            batch = read(batch)
        return {column: batch.by_response(column) for column in reads}

    return predict


def _joined(places: Sequence[frozenset]) -> list[frozenset]:
    """Returns the unions of places that overlap, directly or by others."""
    groups: list[frozenset] = []
    for place in places:
        apart = [group for group in groups if not group & place]
        groups = [*apart, place.union(*(group for group in groups if group & place))]
    return groups
