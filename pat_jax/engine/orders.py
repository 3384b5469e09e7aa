"""What the scheduler orders of an executor, and what came of it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pat_jax.engine.sequences.prefill_calls import Copies, PageMoves
from pat_jax.engine.sequences.state import ReservedPages
from pat_jax.layout.buckets import Shape
from pat_jax.planning.drafts import DraftResult
from pat_jax.planning.types import DraftPrediction, Load, Split


@dataclass(frozen=True)
class Burst:
    """A decode burst to be dispatched: its program, and what ends it."""

    shape: Shape
    max_steps: int
    threshold: int  # it ends when no replica has more running sequences
    is_ahead: bool  # dispatched behind another
    accept_prob: np.ndarray | None  # of drafts, see Plan
    predicted: DraftPrediction | None  # of them
    reserved: ReservedPages  # pages for its rows to draw; where they are too few, it ends


@dataclass(frozen=True)
class Relocation:
    """Running sequences to other replicas, of another layout or of the one they are in."""

    source: Split
    target: Split
    load: Load  # as they were before
    replica: np.ndarray  # int[running], of each afterwards
    is_left: np.ndarray  # bool[running], whose pages are left behind; the others migrate
    moves: PageMoves


class Collected(NamedTuple):
    """What came of a burst."""

    steps: int
    tokens: int
    running_steps: int  # of single rows
    drafted: DraftResult
    held: float  # see BurstResult
    ended: np.ndarray  # int[ended], the sequences that it ended
    poisoned: Copies  # pages to be written over
