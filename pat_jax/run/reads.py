"""Reads: models predict log-probabilities and values of given responses, as columns of a batch.

Models whose devices do no rollouts read responses as they end, on threads (`open_threads`).
Models of whole processes read once all have ended, and the processes exchange the columns. All
others read before the update (`learning.py`). Does not know what the columns are for.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np

from pat_jax.common.gathering import Gathering, is_any
from pat_jax.common.hosts.together import process_group
from pat_jax.common.owners import is_absent, known_to_all
from pat_jax.config.placement import PlacementConfig
from pat_jax.rl.batches.batches import to_read_batch
from pat_jax.rl.batches.packing import Shape, fills
from pat_jax.rl.batches.types import Rollout
from pat_jax.run.start.setup import Setup
from pat_jax.training.roles import Prediction, Roles, States

Columns = Mapping[str, Sequence[np.ndarray]]  # by name: an array per response
Predict = Callable[[Sequence[Rollout]], Columns]


def predicted(
    reads: Sequence[Prediction],
    micro_shapes: Sequence[Shape],
    rollouts: Sequence[Rollout],
    *,
    shares_prompts: bool = False,
) -> Columns:
    """Returns the columns that the models of `reads` predict for the responses of `rollouts`."""
    batch = to_read_batch(rollouts, micro_shapes, shares_prompts=shares_prompts)
    for one in reads:
        batch = one.added_to(batch)
    return {one.column: batch.by_response(one.column) for one in reads}


@dataclass(frozen=True)
class ReadingThread:
    """Models on devices that do no rollouts, and the one thread that runs them."""

    thread: Executor
    predict: Predict  # returns columns by the models' present parameters
    # Whether the given responses fill micro-batches; until then they wait for further ones.
    fills: Callable[[Sequence[Rollout]], bool] = is_any

    def fills_with(self, ended: Sequence[tuple[int, Rollout]]) -> bool:
        return self.fills([rollout for _, rollout in ended])


class ReadsAsTheyEnd:
    """The columns of one batch of responses, predicted while other responses are still generated.

    Attributes:
      columns: empty until `wait` has returned.
      busy_seconds: seconds of prediction, summed over threads.
      waited_seconds: seconds that `wait` took, which is called after the rewards.
    """

    def __init__(self, threads: Sequence[ReadingThread] = ()):
        self.columns: Columns = {}
        self.busy_seconds = self.waited_seconds = 0.0
        self._lock = Lock()
        self._found = dict[str, dict[int, np.ndarray]]()
        self._threads = [
            Gathering(one.thread, partial(self._read, one.predict), one.fills_with)
            for one in threads
        ]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics `reward/early_*`; empty without threads."""
        seconds = {"early_seconds": self.busy_seconds, "early_waited_seconds": self.waited_seconds}
        return {f"reward/{name}": x for name, x in seconds.items()} if self._threads else {}

    def add(self, index: int, ended: Rollout) -> None:
        """Adds a response that has ended, the one of number `index`, and returns at once. Raises an
        earlier error of a thread."""
        for one in self._threads:
            one.add((index, ended))

    def ask(self, responses: Sequence[Rollout]) -> None:
        """Has the threads read the remaining responses, as all have ended, and returns at once."""
        del responses  # `add` has had all of them
        for one in self._threads:
            one.ask()

    def wait(self) -> None:
        """Waits for the columns of all responses."""
        start = time.perf_counter()
        for one in self._threads:
            one.wait()
        self.waited_seconds = time.perf_counter() - start
        self.columns = {
            name: [found[i] for i in range(len(found))] for name, found in self._found.items()
        }

    def _read(self, predict: Predict, ended: Sequence[tuple[int, Rollout]]) -> None:
        start = time.perf_counter()
        found = predict([rollout for _, rollout in ended])
        with self._lock:
            self.busy_seconds += time.perf_counter() - start
            for name, values in found.items():
                by_index = self._found.setdefault(name, {})
                by_index |= {i: x for (i, _), x in zip(ended, values, strict=True)}


class ReadsByProcess:
    """The columns of one batch of responses, each predicted by the processes that own its model.

    Processes predict with their own models at the same time, and score with reward models. Then
    they exchange the columns.

    Args:
      reads: the predictions of all models, in the same order in every process.
      shares_prompts: whether responses in a packed row may share one copy of their prompt.
    """

    metrics: Mapping[str, float] = {}

    def __init__(
        self, reads: Sequence[Prediction], micro_shapes: Sequence[Shape], *, shares_prompts: bool
    ):
        self.columns: Columns = {}  # empty until `wait` has returned
        self._reads = reads
        self._own = [x for x in reads if not is_absent(x.devices)]
        self._micro_shapes = micro_shapes
        self._shares_prompts = shares_prompts
        self._found: Columns = {}  # columns that this process's models predict

    def add(self, index: int, ended: Rollout) -> None:
        """Does nothing: `ask` reads all responses together."""

    def ask(self, responses: Sequence[Rollout]) -> None:
        """Reads all responses with this process's models."""
        self._found = predicted(
            self._own, self._micro_shapes, responses, shares_prompts=self._shares_prompts
        )

    def wait(self) -> None:
        """Exchanges columns with the other processes."""
        self.columns = {
            one.column: known_to_all(one.column, one.devices, self._found.get(one.column, ()))
            for one in self._reads
        }


Reads = ReadsAsTheyEnd | ReadsByProcess  # of one batch


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
