"""What models read of a batch while its last responses are generated on half of the devices.

Once a rollout has left the other half, a thread reads there what has ended, with copies of the
models. What it has not read when the rollout ends is read on all devices. With several processes
the threads of all read the same responses in the same order. Knows roles and one thread. Does not
know what the columns are for.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from jaxtyping import Float, Int

from pat_jax.common.gathering import Gathers
from pat_jax.common.hosts.lane_thread import LaneThread
from pat_jax.config.run import RunConfig
from pat_jax.rl.batches.batches import read_prefixes
from pat_jax.rl.batches.packing import Shape, next_batch
from pat_jax.rl.batches.types import Rollout
from pat_jax.run.early_columns import Columns
from pat_jax.run.lanes import length_of, predicted
from pat_jax.run.process.stop_signals import Stopped
from pat_jax.run.start.tail import CopiedJudge, TailModels
from pat_jax.training.build import shares_prompts
from pat_jax.training.roles import Prediction, Roles, States


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
    _reading: Gathers[int] | None = None  # in the tail

    @classmethod
    def of_run(
        cls, config: RunConfig, roles: Roles, models: TailModels, states: States
    ) -> "TailReads":
        """Returns what is read of one batch of a run."""
        reads = [x for x in roles.predictions(lambda: states) if x.is_column]
        shared = shares_prompts(config.micro_batches, roles.policy.layout.platform)
        return cls(models, reads, roles.micro_shapes, states, shared)

    def add(self, index: int, ended: Rollout) -> None:
        """Adds the response `index`, which has ended. Raises whatever the thread has raised."""
        self._ended[index] = ended
        if self._reading is not None:
            self._reading.add(index)

    @contextmanager
    def reading(self, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Reads what has ended while this is entered. Nothing else may use the half meanwhile. All
        processes must enter and leave it at the same point.

        Args:
          check: raises whatever keeps this process from giving the thread what another process has
            begun.

        Raises whatever the thread has raised."""
        with ExitStack() as stack:
            for copy in self.models.copies:
                stack.callback(copy.end)
                copy.begin(self.states)
            for judge in self.models.judges:
                stack.callback(judge.scores.score_on, None)
            thread = LaneThread("tail")
            # Twice: a signal may end the first wait, and the copies are still read.
            stack.callback(thread.close)
            stack.callback(thread.close)
            self._reading = thread.gathering(self._read_some, int, self._next)
            for index in self._ended:
                self._reading.add(index)
            for judge in self.models.judges:
                score, next_batch = partial(self._scored, judge), judge.scorer.next_batch
                judge.scores.score_on(thread, score, next_batch)
            try:
                yield
            except Stopped:  # in every process at the same point: what one has begun all complete
                check()
                thread.finish()
                raise
            check()
            thread.finish()
            self._reading.left()  # raises what the thread has raised
            self._reading = None

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

    def _read_some(self, some: Sequence[int]) -> None:
        start = time.perf_counter()
        self._read(some, self.models.reads)
        self.busy_seconds += time.perf_counter() - start

    def _scored(
        self, judge: CopiedJudge, texts: Sequence[Int[np.ndarray, " _"]]
    ) -> Float[np.ndarray, " texts"]:
        start = time.perf_counter()
        scores = judge.scorer(texts)
        self.busy_seconds += time.perf_counter() - start
        return scores

    def _next(self, waiting: Sequence[int]) -> Sequence[int]:
        """Chooses the responses of the next micro-batch by their positions; none: there are too
        few."""
        # Those to one prompt together, which they may share.
        order = sorted(range(len(waiting)), key=waiting.__getitem__)
        rollouts = [self._ended[waiting[place]] for place in order]
        shared = read_prefixes(rollouts) if self.shares_prompts else None
        return order[: next_batch(list(map(length_of, rollouts)), self.micro_shapes, shared)]

    def _read(self, some: Sequence[int], reads: Sequence[Prediction]) -> None:
        if some:
            chosen, shares = [self._ended[i] for i in some], self.shares_prompts
            found = predicted(reads, self.micro_shapes, chosen, shares_prompts=shares)
            for k, i in enumerate(some):
                self._found[i] = {name: values[k] for name, values in found.items()}
