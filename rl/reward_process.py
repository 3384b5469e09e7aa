"""The process that a reward function runs in: how it starts, and one call.

Knows the function and what it may return. Does not know time limits or retries
(`reward_workers.py`, `reward_scorer.py`); imports no jax.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType

import numpy as np

from pat_jax.errors import UserError
from pat_jax.rl.rewards import Response, RewardFunction, resolve_reward


@dataclass(frozen=True)
class Batch:
    """The arguments of one call."""

    prompts: Sequence[str]
    completions: Sequence[str]
    columns: Mapping[str, Sequence[object]]

    def __post_init__(self):
        for name, values in {"completions": self.completions, **self.columns}.items():
            if len(values) != len(self):
                raise ValueError(f"{len(self)} prompts, but {len(values)} values of {name!r}")

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def of(cls, responses: Sequence[Response]) -> "Batch":
        """Of at least one response; all have the same columns."""
        return cls(
            [response.prompt for response in responses],
            [response.completion for response in responses],
            {name: [one.columns[name] for one in responses] for name in responses[0].columns},
        )

    def responses(self) -> list[Response]:
        return [
            Response(prompt, text, {name: values[i] for name, values in self.columns.items()})
            for i, (prompt, text) in enumerate(zip(self.prompts, self.completions, strict=True))
        ]


@dataclass(frozen=True)
class Outcome:
    """What became of a call: scores, or why there are none."""

    scores: tuple[float, ...] | None = None
    failure: str = ""  # these responses could not be scored
    mistake: str = ""  # the reward function, or its use, is wrong for all responses
    has_raised: bool = False
    seconds: float = 0.0  # that the function took


@dataclass
class _Worker:
    spec: str
    function: RewardFunction | None
    import_mistake: str


_worker: _Worker | None = None  # of this process; the function itself may not be picklable


def start_worker(spec: str) -> None:
    """Imports the function when the process starts, outside of any response's time limit."""
    global _worker
    os.environ["JAX_PLATFORMS"] = "cpu"  # a reward that uses jax must not touch the accelerator
    sys.path.append(os.getcwd())
    try:
        _worker = _Worker(spec, resolve_reward(spec), "")
    except UserError as error:
        _worker = _Worker(spec, None, str(error))


def find_import_mistake() -> str:
    assert _worker is not None
    return _worker.import_mistake


def score_in_worker(batch: Batch) -> Outcome:
    start = time.perf_counter()
    outcome = _score(batch)
    return replace(outcome, seconds=time.perf_counter() - start)


def _score(batch: Batch) -> Outcome:
    assert _worker is not None
    if _worker.function is None:
        return Outcome(mistake=_worker.import_mistake)
    try:
        scores = _worker.function(
            prompts=list(batch.prompts), completions=list(batch.completions), **batch.columns
        )
        return Outcome(scores=_check_scores(scores, len(batch), _worker.spec))
    except UserError as error:
        return Outcome(mistake=str(error))
    # Code of the user may raise anything, and not all of it can be sent to another process.
    except (Exception, SystemExit) as error:
        return Outcome(failure=f"raised {type(error).__name__} ({error})", has_raised=True)


def _check_scores(scores: object, count: int, spec: str) -> tuple[float, ...]:
    expected = f"expected a list of {count} finite numbers, one a response; correct the function."
    if not isinstance(scores, Sequence | np.ndarray) or isinstance(scores, str):
        raise UserError(f"reward {spec!r} returned {scores!r:.60}: {expected}")
    if len(scores) != count:
        raise UserError(f"reward {spec!r} returned {len(scores)} values: {expected}")
    for position, score in enumerate(scores):
        is_number = isinstance(score, int | float | np.number | np.bool_)
        if not is_number or not math.isfinite(score):
            raise UserError(
                f"reward {spec!r} returned {score!r:.60} for response {position}: {expected}"
            )
    return tuple(float(score) for score in scores)


_main_lock = threading.Lock()


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    with _main_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class _BareSpawnProcess(SpawnProcess):
    """A spawned process that does not import the parent's main module.

    Spawning runs the command's file again under another name, which for the trainer means jax and
    the models: seconds and hundreds of megabytes for each worker, and for each one that is killed.
    """

    def start(self) -> None:
        with _main_hidden():
            super().start()


class BareSpawnContext(SpawnContext):
    Process = _BareSpawnProcess
