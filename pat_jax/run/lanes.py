"""The threads that run models on devices which do no rollouts.

Two threads must not give programs to one device. So the roles whose devices overlap are one lane,
and during a rollout each lane has a thread of its own. With several processes there are no lanes:
programs would have to begin in the same order in all. Knows roles and devices. Does not know which
responses there are (`early_columns.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pat_jax.common.hosts.together import process_group
from pat_jax.config.placement import PlacementConfig
from pat_jax.rl.batches.batches import to_read_batch
from pat_jax.rl.batches.packing import Shape, fills
from pat_jax.rl.batches.types import Rollout
from pat_jax.run.early_columns import Lane
from pat_jax.run.start.setup import Setup
from pat_jax.training.roles import Prediction, Roles, States


@dataclass
class Lanes:
    """What runs beside the rollouts of a run."""

    readers: list[Lane] = field(default_factory=list)
    late: Executor | None = None  # of whole updates; None: none goes on beside rollouts


@contextmanager
def open_lanes(
    setup: Setup,
    states: Callable[[], States],
    placement: PlacementConfig,
    *,
    is_deterministic: bool,
) -> Iterator[Lanes]:
    """Yields the lanes of a run, and gives each reward model the thread of its lane.

    There are none if all models share the rollouts' devices, with several processes, and with
    `--deterministic`: what is read together would depend on the clock.

    Args:
      states: returns the present states of trained roles.
    """
    lanes = Lanes()
    if is_deterministic or not process_group().is_alone:
        yield lanes
        return
    rollout = frozenset(setup.engine.mesh.devices.flat)
    readers = [x for x in setup.roles.predictions(states) if x.is_column]
    judges = [(one.reader.devices, one) for one in setup.reward_models.values()]
    # What an update needs once all columns are there.
    trained = (role.layout.devices for role in setup.roles.trained if placement.lag)
    late = frozenset().union(*trained)
    every = [*(x.devices for x in readers), *(place for place, _ in judges), late]
    with ExitStack() as threads:
        for number, group in enumerate(_joined([x for x in every if x and not x & rollout])):
            thread = ThreadPoolExecutor(1, thread_name_prefix=f"lane{number}")
            threads.callback(thread.shutdown, cancel_futures=True)
            for place, judge in judges:
                if place <= group:
                    judge.scores.score_on(thread)
                    threads.callback(judge.scores.score_on, None)
            if reads := [x for x in readers if x.devices <= group]:
                read = partial(predicted, reads, setup.roles.micro_shapes)
                lanes.readers.append(Lane(thread, read, partial(_fill, setup.roles)))
            if late and late <= group:
                lanes.late = thread
        yield lanes


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
    lengths = [len(one.prompt.tokens) + len(one.tokens) for one in rollouts]
    return fills(lengths, roles.micro_shapes)


def _joined(places: Sequence[frozenset]) -> list[frozenset]:
    """Returns the unions of places that overlap, directly or by others."""
    groups: list[frozenset] = []
    for place in places:
        apart = [group for group in groups if not group & place]
        groups = [*apart, place.union(*(group for group in groups if group & place))]
    return groups
