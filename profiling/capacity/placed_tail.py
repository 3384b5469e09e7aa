"""Replays rollouts whose last responses are generated on half of the devices.

Models read on the other half meanwhile what has ended (`run/tail_reads.py`). Knows one rollout at a
time. Does not know what an iteration does afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.profiling.simulate.comparison import Replayed
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replayed

# Responses left with which a tail may begin: those that are tried.
LEFT = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Half:
    """What works in a tail."""

    machine: Machine  # of the half that generates
    at_once: int  # responses that fill a micro-batch of the other half
    moved_s: float  # seconds in which weights and copies of models come there
    reads_s: Callable[[Workload], float]  # of all models that read, on the other half


@dataclass(frozen=True)
class Tail:
    """A rollout with a tail."""

    rollout_s: float
    added_s: float  # of these, what it takes longer than on all devices
    is_read: np.ndarray  # bool[responses], what models have read when it ends


def with_tail(rollout: Replayed, left: int, half: Half) -> Tail | None:
    """Returns the rollout if its last responses, `left` or fewer, are generated on a half.

    None: no such tail begins before all have ended."""
    work, ended_s = rollout.workload, rollout.ended_s
    if left >= work.size:
        return None
    begin_s = np.sort(ended_s)[work.size - left - 1]
    is_left = ended_s > begin_s
    if not is_left.any():
        return None
    tail_s, after_s = _generated(_rest(work, is_left), half.machine)
    there_s = np.zeros(work.size)  # when each can be read, since the tail has begun
    there_s[is_left] = after_s
    early = work.only(np.flatnonzero(~is_left))
    tokens = work.prompts + work.responses
    reads_s = half.reads_s(early) / tokens[~is_left].sum() * tokens
    # In the order in which they ended; a last few fill no micro-batch, and wait.
    order = np.argsort(np.where(is_left, there_s, ended_s - begin_s - tail_s), kind="stable")
    is_read = _read(order, there_s, reads_s, tail_s)
    is_read[order[max(0, work.size - half.at_once) :]] = False
    rollout_s = begin_s + half.moved_s + tail_s
    return Tail(rollout_s, rollout_s - rollout.total_s, is_read)


def _rest(work: Workload, is_left: np.ndarray) -> Workload:
    """The responses that are left when all others have ended, with what they have as prompts."""
    rest = work.only(np.flatnonzero(is_left))
    most = int(work.responses[~is_left].max())  # all have made as many steps
    done = min(most, int(rest.responses.min()) - 1)
    return Workload(rest.prompts + done, rest.responses - done, work.cap - done, rest.prompt_id)


def _generated(work: Workload, machine: Machine) -> tuple[float, np.ndarray]:
    """Seconds of a rollout whose lengths the planner has seen in another one like it, and seconds
    after which each response ends."""
    is_cut = work.responses >= work.cap
    learned = LengthModel.empty(work.cap).updated(work.responses, is_cut, work.prompt_id)
    planner = CostModelPlanner(machine.splits, machine.truth, learned, memory=machine.memory)
    report, ended_s = replayed(work, planner, machine)
    return report.total_s, ended_s


def _read(
    order: np.ndarray, there_s: np.ndarray, reads_s: np.ndarray, until_s: float
) -> np.ndarray:
    """The responses that are read by then, one after the other in this order, bool[responses].

    Args:
      there_s: when each can be read.
      reads_s: how long that takes.
    """
    now, found = 0.0, np.zeros(len(order), bool)
    for i in order.tolist():
        now = max(now, there_s[i]) + reads_s[i]
        found[i] = now <= until_s
    return found
