"""The threads that run models on devices which do no rollouts.

Two threads must not dispatch programs to one device, so models whose devices overlap share a
thread. Runs of several processes have no such threads: all processes would have to dispatch
programs in the same order. Knows roles and devices. Does not know responses (`reads.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from pat_jax.common.hosts.together import process_group
from pat_jax.config.placement import PlacementConfig
from pat_jax.rl.batches.packing import fills
from pat_jax.rl.batches.types import Rollout
from pat_jax.run.reads import ReadingThread, predicted
from pat_jax.run.start.setup import Setup
from pat_jax.training.roles import Roles, States


@dataclass(frozen=True)
class Threads:
    """The threads that run during rollouts."""

    readers: Sequence[ReadingThread] = ()
    updates: Executor | None = None  # thread of updates; None: none runs during rollouts


@contextmanager
def open_threads(
    setup: Setup,
    states: Callable[[], States],
    placement: PlacementConfig,
    *,
    is_deterministic: bool,
) -> Iterator[Threads]:
    """Yields the threads of a run, and has reward models on their devices score on them.

    There are no threads if all models share the rollouts' devices, with several processes, and
    with `--deterministic`, where a clock must not decide what a micro-batch contains.

    Args:
      states: a function that returns the present states of trained roles.
    """
    if is_deterministic or not process_group().is_alone:
        yield Threads()
        return
    rollout = frozenset(setup.engine.mesh.devices.flat)
    reads = [x for x in setup.roles.predictions(states) if x.is_column]
    reward_models = list(setup.reward_models.values())
    # What an update needs once all columns are there.
    trained = (role.layout.devices for role in setup.roles.trained if placement.lag)
    of_updates = frozenset().union(*trained)
    every = [x.devices for x in reads] + [x.reader.devices for x in reward_models] + [of_updates]
    readers = list[ReadingThread]()
    updates = None
    with ExitStack() as ends:
        for number, group in enumerate(_joined([x for x in every if x and not x & rollout])):
            thread = ThreadPoolExecutor(1, thread_name_prefix=f"reads{number}")
            ends.callback(thread.shutdown, cancel_futures=True)
            for one in reward_models:
                if one.reader.devices <= group:
                    one.scores.score_on(thread)
                    ends.callback(one.scores.score_on, None)
            if own := [x for x in reads if x.devices <= group]:
                read = partial(predicted, own, setup.roles.micro_shapes)
                readers.append(ReadingThread(thread, read, partial(_fill, setup.roles)))
            if of_updates and of_updates <= group:
                updates = thread
        yield Threads(readers, updates)


def _fill(roles: Roles, rollouts: Sequence[Rollout]) -> bool:
    lengths = [len(one.prompt.tokens) + len(one.tokens) for one in rollouts]
    return fills(lengths, roles.micro_shapes)


def _joined(places: Sequence[frozenset]) -> list[frozenset]:
    """Returns the unions of sets of devices that overlap, directly or through others."""
    groups: list[frozenset] = []
    for place in places:
        apart = [group for group in groups if not group & place]
        groups = [*apart, place.union(*(group for group in groups if group & place))]
    return groups
