"""Chooses what computes a reward: this process, worker processes, an endpoint, or a model.

Knows which kind of reward a name stands for. Does not know which responses a call is for
(`function.py`).
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from pat_jax.rl.rewards.built_in import BUILT_IN, NONE
from pat_jax.rl.rewards.endpoint import RewardEndpoint
from pat_jax.rl.rewards.model import RewardModel
from pat_jax.rl.rewards.outcome import Outcome
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.rewards import is_endpoint, model_of
from pat_jax.rl.rewards.signatures import Recognised
from pat_jax.rl.rewards.workers import RewardWorkers

# Functions that only compare strings and cannot hang: a worker would cost more than they do.
_IN_PROCESS = ("exact", NONE)


@dataclass(frozen=True)
class Limits:
    """Limits on the calls of each reward function."""

    timeout: float  # seconds per response; a call may take their sum over its responses
    num_workers: int = 1  # largest number of calls at a time
    memory: float = 0.0  # GiB of each process; 0: no limit
    retries: int = 0  # further tries of a failed call to an endpoint
    token: str = field(default="", repr=False)  # authorization token sent to endpoints


def open_caller(spec: str, limits: Limits, models: Mapping[str, RewardModel]) -> "Caller":
    """Returns the caller of the reward `spec`: one of `models` if `spec` names a model. Raises
    UserError if the function cannot be imported, or if an address is not valid."""
    if model_of(spec):
        return models[spec]
    if spec in _IN_PROCESS:
        return _InProcess(spec)
    if is_endpoint(spec):
        return RewardEndpoint(spec, limits.num_workers, limits.retries, limits.token)
    return RewardWorkers(spec, limits.num_workers, limits.memory)


class _InProcess:
    """Calls a built-in function in this process."""

    def __init__(self, spec: str):
        self._function = Recognised(BUILT_IN[spec], spec)

    def submit(self, responses: Sequence[Response], seconds: float) -> Future[Outcome]:
        del seconds
        start = time.perf_counter()
        here = Future[Outcome]()
        outcome = self._function(responses)
        here.set_result(replace(outcome, seconds=time.perf_counter() - start))
        return here

    def close(self) -> None:
        """Does nothing, since there is no process to end."""


Caller = RewardModel | RewardEndpoint | RewardWorkers | _InProcess
