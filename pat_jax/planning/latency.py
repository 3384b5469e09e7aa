"""What things cost on this machine: measured tables, and what follows from them for the rest.

Made by `profiling`, handed over by value. `observed` returns a model corrected by what a run saw.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

import numpy as np

from pat_jax.planning.step_model import Surface
from pat_jax.planning.types import Split

Numbers = float | np.ndarray
ROUNDS = ("all", "one")  # rounds of a migration: every group takes part, or one
TABLES = ("decode_table", "reslice_table", "migrate_table", "prefill_table")
SHAPE = ("prefill_blocks", "page_size", "round_tokens")  # what one entry of a table does
RECENT = 5  # what a correction rests on: bursts of a layout, and before them what was believed
BELIEVED = 2  # bursts that what was believed counts for, at most
ODD = 0.25  # log ratio; a burst further than this from the median counts as this far
MOST = math.log(2)  # log ratio; a machine further than this from its profile needs a new one


def migration(
    source_dp: Numbers,
    target_dp: Numbers,
    everybody: Numbers,
    one: Numbers,
    fullest: Numbers,
    live: Numbers,
) -> Numbers:
    """Seconds of a migration of `live` sequences with the pages of one round each.

    As far as groups are alike they move pages in the same rounds, of `everybody` seconds; the others
    move `one` by one (`engine/rounds.py`). The fullest group and the mean are known here: the
    emptiest is taken to lack what the fullest has more. Groups split evenly.
    """
    groups = np.maximum(source_dp, target_dp)
    mean = live / groups
    alike = np.where(target_dp > source_dp, mean, np.maximum(0.0, 2 * mean - fullest))
    return alike * everybody + (live - groups * alike) * one


@dataclass(frozen=True)
class LatencyModel:
    """Seconds. Rows are those of one data-parallel group, lengths are cache lengths in tokens."""

    decode_table: Mapping[tuple[Split, int, int], float]  # (split, rows, length): one decode step
    reslice_table: Mapping[tuple[Split, Split], float]  # (from, to): all weights
    migrate_table: Mapping[
        tuple[Split, Split, str], float
    ]  # (from, to, ROUNDS): one round of pages; (layout, itself, "all"): to another group of it
    prefill_table: Mapping[tuple[Split, int], float]  # (split, length): one prefill call
    prefill_blocks: int  # pages of a group that one call computes
    page_size: int  # tokens
    round_tokens: int  # of a group, that one round of a migration moves
    correction: Mapping[Split, float] = field(
        default_factory=dict
    )  # measured / predicted step time
    recent: Mapping[Split, tuple[float, ...]] = field(
        default_factory=dict
    )  # log ratios that the correction is taken from, oldest first

    @cached_property
    def decode(self) -> dict[Split, Surface]:
        """The profiled step time of each layout, by rows and length."""
        points = defaultdict(dict)
        for (split, rows, length), seconds in self.decode_table.items():
            points[split][rows, length] = seconds
        return {split: Surface(known) for split, known in points.items()}

    @cached_property
    def prefill(self) -> dict[Split, Surface]:
        """The time of a prefill call of each layout, by blocks of the call and length."""
        points = defaultdict(dict)
        for (split, length), seconds in self.prefill_table.items():
            points[split][self.prefill_blocks, length] = seconds
        return {split: Surface(known) for split, known in points.items()}

    def decode_step(self, split: Split, rows: int, length: int) -> float:
        """One decode step with `rows` live rows in the fullest group and contexts up to `length`.

        A load between two buckets runs in the larger one, and costs what that one costs.
        """
        surface = self.decode[split]
        return surface(*surface.cover(rows, length)) * self.corrected(split)

    def corrected(self, split: Split) -> float:
        """Measured over profiled step time, as far as it is known.

        A layout not seen yet gets the benefit of the doubt, as much of it as the others gave reason
        for: half of what the profile was wrong by there, and all of it where they were faster. A
        profile that holds is taken at its word.
        """
        if split in self.correction or not self.correction:
            return self.correction.get(split, 1.0)
        errors = [math.log(ratio) for ratio in self.correction.values()]
        mean = sum(errors) / len(errors)
        size = math.sqrt(sum(error * error for error in errors) / len(errors))
        return math.exp(min(mean, -0.5 * size))

    def reslice(self, source: Split, target: Split) -> float:
        return self.reslice_table[(source, target)]

    def migrate(
        self, source: Split, target: Split, fullest: Numbers, live: Numbers, context: Numbers
    ) -> Numbers:
        """The pages of `live` sequences of `context` tokens, `fullest` in one group of `source`."""
        everybody, one = (self.migrate_table[(source, target, kind)] for kind in ROUNDS)
        seconds = migration(source.dp, target.dp, everybody, one, fullest, live)
        return context / self.round_tokens * seconds

    def shift_round(self, split: Split) -> float:
        """One round of pages from groups of a layout to others of it; infinite if not measured."""
        return self.migrate_table.get((split, split, "all"), math.inf)

    def recompute(self, target: Split, rows: float, length: int) -> float:
        """Prefill of `rows` rows a group, each of `length` tokens, in `target`.

        Lower positions come first, so most calls see shorter contexts than `length`. What is left
        for smaller calls is priced as a whole one.
        """
        pages = -(-length // self.page_size)
        calls, done, seconds = math.ceil(rows * pages / self.prefill_blocks), 0, 0.0
        for bucket in self.prefill[target].lengths:
            if bucket >= length:
                break
            upto = int(rows * bucket / self.page_size / self.prefill_blocks)
            seconds += (upto - done) * self.prefill_call(target, bucket)
            done = upto
        return seconds + (calls - done) * self.prefill_call(target, length)

    def prefill_call(self, split: Split, length: int) -> float:
        """One call of `prefill_blocks` blocks a group, in contexts of up to `length` tokens."""
        surface = self.prefill[split]
        return surface(self.prefill_blocks, surface.cover(0, length)[1])

    def on(self, rows: Mapping[Split, Sequence[int]], lengths: Sequence[int]) -> "LatencyModel":
        """What an engine costs whose buckets are these: as measured where they were, else predicted.

        A profile may hold other buckets as well. No load runs in them here, so they go: taken for
        the one that covers a load, they would give it the time of a program that is not there.

        A layout of which nothing has been measured is left out.

        Args:
          rows: row buckets of one data-parallel group, by layout.
          lengths: cache lengths in tokens.
        """
        return replace(
            self,
            decode_table={
                (split, n, length): self.decode[split](n, length)
                for split in rows.keys() & self.decode.keys()
                for n in rows[split]
                for length in lengths
            },
            prefill_table={
                (split, length): self.prefill[split](self.prefill_blocks, length)
                for split in rows.keys() & self.prefill.keys()
                for length in lengths
            },
        )

    def observed(self, split: Split, rows: int, length: int, seconds: float) -> "LatencyModel":
        """Corrected by one measured step time: drift, heat, a noisy neighbour.

        The correction is the mean of the last log ratios about their median (Huber's estimator of
        location, one step), those of the first bursts filled up with what was believed before.
        One odd burst hardly moves it; of a lasting change it knows all after `RECENT` bursts.
        """
        believed = self.corrected(split)
        profiled = self.decode_step(split, rows, length) / believed
        ratio = _within(math.log(seconds / profiled), MOST)
        before = self.recent.get(split, (math.log(believed),) * BELIEVED)
        recent = (*before, ratio)[-RECENT:]
        middle = median(recent)
        error = middle + fmean(_within(one - middle, ODD) for one in recent)
        model = replace(
            self,
            correction={**self.correction, split: math.exp(error)},
            recent={**self.recent, split: recent},
        )
        model.__dict__["decode"] = self.decode  # the tables are the same: sorted and fitted once
        return model

    def covers(self, other: "LatencyModel") -> bool:
        """Whether every time that `other` knows is known here.

        Not of moves between groups of a layout: where none is known, none is made.
        """
        return all(getattr(self, name) == getattr(other, name) for name in SHAPE) and all(
            {key for key in getattr(other, name) if name != "migrate_table" or key[0] != key[1]}
            <= getattr(self, name).keys()
            for name in TABLES
        )

    def to_json(self) -> dict[str, Any]:
        """The measured tables; what a run has corrected is not among them."""
        tables = {
            name: [[_plain(key), seconds] for key, seconds in getattr(self, name).items()]
            for name in TABLES
        }
        return {**tables, **{name: getattr(self, name) for name in SHAPE}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LatencyModel":
        tables: dict[str, Any] = {
            name: {_from_plain(key): seconds for key, seconds in data[name]} for name in TABLES
        }
        return cls(**tables, **{name: data[name] for name in SHAPE})


def _within(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


def _plain(key: tuple) -> list:
    return [list(part) if isinstance(part, Split) else part for part in key]


def _from_plain(key: list) -> tuple:
    return tuple(Split(*part) if isinstance(part, list) else part for part in key)
