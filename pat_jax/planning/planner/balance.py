"""What it costs to move sequences between the data-parallel groups of a layout, in one stage or in two."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.types import Load, SendLimits, Split


def balance_seconds(latency: LatencyModel, split: Split, load: Load, group: np.ndarray) -> float:
    """Profiled seconds until every sequence of `load` is in its `group`, int[live], at least one of
    them another than now; infinite where no such move was measured.
    """
    rounds = int(_rounds(latency, split, load, group).sum())
    return rounds * latency.shift_round(split)


def _rounds(latency: LatencyModel, split: Split, load: Load, group: np.ndarray) -> np.ndarray:
    """Rounds of pages that go equally far, int[distances].

    They go together (`engine/relocation/rounds.py`): of each distance the group that has most to send sets
    the number of rounds.
    """
    moved = np.flatnonzero(group != load.group)
    tokens = np.zeros((split.dp, split.dp))
    distance = (group - load.group)[moved] % split.dp
    np.add.at(tokens, (distance, load.group[moved]), load.context[moved])
    return np.ceil(tokens.max(axis=1) / latency.round_tokens).astype(int)


class Stages(NamedTuple):
    """A move in two stages, by the profile."""

    idle_s: float  # in which nothing decodes: pages packed and unpacked, and those that follow
    steps: int  # of the burst in between
    later_s: float  # lost because groups are even only behind it


def two_stages(
    latency: LatencyModel,
    split: Split,
    load: Load,
    group: np.ndarray,
    step_s: tuple[float, float],
    limits: SendLimits,
) -> Stages | None:
    """The move of `balance_seconds` when what will not change any more is sent while all decode on.

    The last page of each sequence, and those that are filled meanwhile, follow in a round of each distance.

    Args:
      step_s: of a decode step, seconds as long as sequences are where they are, and in their `group`.

    Returns:
      None where nothing can be sent: it was not measured, or memory holds no round.
    """
    rounds = _rounds(latency, split, load, group)
    packed_s, sent_s = latency.shift_stages(split)
    if not limits.rounds or math.isinf(packed_s + sent_s):
        return None
    # One distance after the other.
    sent = np.clip(limits.rounds - (rounds.cumsum() - rounds), 0, rounds)
    uneven_s, even_s = step_s
    steps = limits.steps * math.ceil(sent.sum() * sent_s / (limits.steps * uneven_s))
    by_then = _rounds(latency, split, replace(load, context=load.context + steps), group)
    follow = np.maximum(by_then - sent, rounds > 0)
    idle_s = float(sent.sum() * packed_s + follow.sum() * latency.shift_round(split))
    return Stages(idle_s, steps, steps * max(0.0, uneven_s - even_s))
