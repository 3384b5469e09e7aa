"""Replays rollouts whose last responses are generated on half of the devices.

Models read on the other half meanwhile what has ended (`run/tail_reads.py`). Knows one rollout at a
time. Does not know what an iteration does afterwards.
"""

from collections.abc import Callable, Mapping
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
    moved_s: float  # seconds in which weights and copies of models come there
    # How many of the first responses, in the order of prompts, models read together; 0: they wait.
    next_read: Callable[[Workload], int]
    reads_s: Callable[[Workload], Mapping[str, float]]  # of each model, on the other half
    times: float = 1.0  # by which all of it takes longer than was composed


@dataclass(frozen=True)
class Tail:
    """A rollout with a tail."""

    rollout_s: float
    is_read: np.ndarray  # bool[responses], what models have read when it ends
    read_s: Mapping[str, float]  # how long that took, by stage


def with_tail(rollout: Replayed, left: int, half: Half) -> Tail | None:
    """Returns the rollout if its last responses, `left` or fewer, are generated on a half.

    None: no such tail begins before all have ended. Or sequences had to wait for pages, so that it
    is not known how long those are that are left."""
    work, ended_s = rollout.workload, rollout.ended_s
    if left >= work.size or rollout.is_pressed:
        return None
    begin_s = np.sort(ended_s)[work.size - left - 1]
    is_left = ended_s > begin_s
    if not is_left.any():
        return None
    tail_s, after_s = _generated(_rest(work, is_left), half.machine)
    there_s = np.zeros(work.size)  # when each can be read, since the tail has begun
    there_s[is_left] = half.times * after_s
    tail_s *= half.times
    is_read, read_s, until_s = _read(work, there_s, tail_s, half)
    rollout_s = begin_s + half.times * half.moved_s + max(tail_s, until_s)
    return Tail(rollout_s, is_read, read_s)


def _rest(work: Workload, is_left: np.ndarray) -> Workload:
    """The responses that are left when all others have ended, with what they have as prompts, which
    no two of them share."""
    rest = work.only(np.flatnonzero(is_left))
    most = int(work.responses[~is_left].max())  # all have made as many steps
    done = min(most, int(rest.responses.min()) - 1)
    return Workload(rest.prompts + done, rest.responses - done, work.cap - done)


def _generated(work: Workload, machine: Machine) -> tuple[float, np.ndarray]:
    """Seconds of a rollout whose lengths the planner has seen in another one like it, and seconds
    after which each response ends."""
    learned = LengthModel.empty(work.cap).updated(work.responses, work.responses >= work.cap)
    planner = CostModelPlanner(machine.splits, machine.truth, learned, memory=machine.memory)
    report, ended_s = replayed(work, planner, machine)
    return report.total_s, ended_s


def _read(
    work: Workload, there_s: np.ndarray, until_s: float, half: Half
) -> tuple[np.ndarray, dict[str, float], float]:
    """Replays the thread that reads. Returns bool[responses], what it reads until then, the seconds
    of each stage, and when it ends: it completes what it has begun.

    Args:
      there_s: when each response can be read.
    """
    now, is_read, read_s = 0.0, np.zeros(work.size, bool), dict[str, float]()
    while now < until_s:
        (some,) = np.nonzero((there_s <= now) & ~is_read)
        if count := half.next_read(work.only(some)) if len(some) else 0:
            for name, seconds in half.reads_s(work.only(some[:count])).items():
                read_s[name] = read_s.get(name, 0.0) + half.times * seconds
                now += half.times * seconds
            is_read[some[:count]] = True
        else:
            now = there_s[there_s > now].min(initial=until_s)
    return is_read, read_s, now
