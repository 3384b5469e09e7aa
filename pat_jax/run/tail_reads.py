"""What models read of a batch while its last responses are generated on half of the devices.

Once a rollout has left the other half, a thread reads there what has ended, with copies of the
models. What it has not read when the rollout ends is read on all devices. Knows roles and one
thread. Does not know what the columns are for.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock

import numpy as np

from pat_jax.config.run import RunConfig
from pat_jax.rl.batches.batches import read_prefixes
from pat_jax.rl.batches.packing import Shape, next_batch
from pat_jax.rl.batches.types import Rollout
from pat_jax.run.early_columns import Columns
from pat_jax.run.lanes import length_of, predicted
from pat_jax.run.start.tail import TailModels
from pat_jax.training.build import shares_prompts
from pat_jax.training.roles import Prediction, Roles, States

LOOK_S = 0.05  # between two looks whether enough has ended


@dataclass
class TailReads:
    """The columns and model scores of one batch that are computed in the tail of its rollout.

    Args:
      models: copies of models on the half that the rollout leaves.
      reads: the predictions of the models themselves, on all devices.
      states: the present states of trained roles.
      shares_prompts: whether responses may share their prompt in a row.
    """

    models: TailModels
    reads: Sequence[Prediction]
    micro_shapes: Sequence[Shape]
    states: States
    shares_prompts: bool = False
    busy_seconds: float = 0.0  # of the thread
    waited_seconds: float = 0.0  # after the rewards, for what is read on all devices
    columns: Columns = field(default_factory=dict)  # once all are there
    _ended: dict[int, Rollout] = field(default_factory=dict)
    _found: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)  # by response
    _is_over: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)
    _work: Future[None] | None = None

    @classmethod
    def of_run(
        cls, config: RunConfig, roles: Roles, models: TailModels, states: States
    ) -> "TailReads":
        """Returns what is read of one batch of a run."""
        reads = [x for x in roles.predictions(lambda: states) if x.is_column]
        shared = shares_prompts(config, roles.policy.layout.platform)
        return cls(models, reads, roles.micro_shapes, states, shared)

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return self._work is not None and self._work.done()

    def add(self, index: int, ended: Rollout) -> None:
        """Adds the response `index`, which has ended. Raises whatever the thread has raised."""
        if self._work is not None and self.has_ended:
            self._work.result()
        with self._lock:
            self._ended[index] = ended

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Reads what has ended while this is entered. Nothing else may use the half meanwhile.

        Raises whatever the thread has raised."""
        with ExitStack() as copies:
            for copy in self.models.copies:
                copies.callback(copy.end)
                copy.begin(self.states)
            pool = ThreadPoolExecutor(1, thread_name_prefix="tail")
            self._work = pool.submit(self._read_on)
            pool.shutdown(wait=False)
            # Twice: a signal may end the first wait, and the copies are still read.
            copies.callback(wait, [self._work])
            copies.callback(wait, [self._work])
            copies.callback(self._is_over.set)
            yield
        self._work.result()

    def ask(self) -> None:
        """What waits is read on all devices, by `wait`."""

    def wait(self, count: int) -> None:
        """Reads on all devices what is left of `count` responses."""
        start = time.perf_counter()
        self._read([i for i in range(count) if i not in self._found], self.reads)
        self.waited_seconds = time.perf_counter() - start
        self.columns = self.of(range(count))

    def of(self, indices: Sequence[int]) -> Columns:
        """Returns the columns of some responses, which were read."""
        return {x.column: [self._found[i][x.column] for i in indices] for x in self.reads}

    def _read_on(self) -> None:
        while not self._is_over.is_set():
            start = time.perf_counter()
            has_read = self._read(self._next(), self.models.reads)
            has_scored = [judge.score_some() for judge in self.models.judges]
            if has_read or any(has_scored):
                self.busy_seconds += time.perf_counter() - start
            else:
                self._is_over.wait(LOOK_S)

    def _next(self) -> list[int]:
        """Returns the responses of the next micro-batch; none: there are too few."""
        with self._lock:  # those to one prompt together, which they may share
            left = sorted(i for i in self._ended if i not in self._found)
        rollouts = [self._ended[i] for i in left]
        shared = read_prefixes(rollouts) if self.shares_prompts else None
        return left[: next_batch(list(map(length_of, rollouts)), self.micro_shapes, shared)]

    def _read(self, some: Sequence[int], reads: Sequence[Prediction]) -> bool:
        if some:
            chosen, shares = [self._ended[i] for i in some], self.shares_prompts
            found = predicted(reads, self.micro_shapes, chosen, shares_prompts=shares)
            for k, i in enumerate(some):
                self._found[i] = {name: values[k] for name, values in found.items()}
        return len(some) > 0
