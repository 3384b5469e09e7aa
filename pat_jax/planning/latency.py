"""What things cost on this machine: measured tables, looked up between their points.

Made by `profiling`, handed over by value. `observed` returns a model corrected by what a run saw.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pat_jax.planning.types import Split

Numbers = float | np.ndarray
ROUNDS = ("all", "one")  # rounds of a migration: every group takes part, or one
TABLES = ("decode_table", "reslice_table", "migrate_table", "prefill_table")
SHAPE = ("prefill_rows", "prefill_chunk", "round_tokens")  # what one entry of a table does


class _Grid(NamedTuple):
    """The measured points of one table row: every row bucket with every length, ascending."""

    rows: list[int]
    lengths: list[int]

    def cover(self, rows: int, length: int) -> tuple[int, int]:
        """The bucket that a load of this size runs in; past the table, its largest."""
        row = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        column = min(bisect_left(self.lengths, length), len(self.lengths) - 1)
        return self.rows[row], self.lengths[column]


def _grids(points: Iterable[tuple[Hashable, int, int]]) -> dict[Hashable, _Grid]:
    rows, lengths = defaultdict(set), defaultdict(set)
    for name, row, length in points:
        rows[name].add(row)
        lengths[name].add(length)
    return {name: _Grid(sorted(rows[name]), sorted(lengths[name])) for name in rows}


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
    ]  # (from, to, ROUNDS): one round of pages
    prefill_table: Mapping[tuple[Split, int], float]  # (split, length): one prefill call
    prefill_rows: int  # rows of one call
    prefill_chunk: int  # tokens a row of one call
    round_tokens: int  # of a group, that one round of a migration moves
    correction: Mapping[Split, float] = field(
        default_factory=dict
    )  # measured / predicted step time

    @cached_property
    def _decode_grid(self) -> dict[Hashable, _Grid]:
        return _grids(self.decode_table)

    @cached_property
    def _prefill_grid(self) -> dict[Hashable, _Grid]:
        return _grids((split, 0, length) for split, length in self.prefill_table)

    def decode_step(self, split: Split, rows: int, length: int) -> float:
        """One decode step with `rows` live rows in the fullest group and contexts up to `length`."""
        at = self._decode_grid[split].cover(rows, length)
        scale = max(1.0, rows / at[0]) * max(1.0, length / at[1])  # past the table: in proportion
        return self.decode_table[(split, *at)] * scale * self.corrected(split)

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

    def recompute(self, target: Split, rows: int, length: int) -> float:
        """Prefill of `rows` rows a group, each of `length` tokens, in `target`."""
        at = self._prefill_grid[target].cover(0, length)[1]
        calls = -(-rows // self.prefill_rows) * -(-length // math.gcd(self.prefill_chunk, at))
        return calls * self.prefill_call(target, length)

    def prefill_call(self, split: Split, length: int) -> float:
        """One chunk of `prefill_rows` rows a group, into a cache that holds `length` tokens."""
        return self.prefill_table[(split, self._prefill_grid[split].cover(0, length)[1])]

    def observed(
        self, split: Split, rows: int, length: int, seconds: float, *, weight: float = 0.1
    ) -> "LatencyModel":
        """Corrected by one measured step time: drift, heat, a noisy neighbour."""
        old = self.corrected(split)
        ratio = seconds / (self.decode_step(split, rows, length) / old)
        new = (1 - weight) * old + weight * min(max(ratio, 0.5), 2.0)
        model = replace(self, correction={**self.correction, split: new})
        model.__dict__["_decode_grid"] = self._decode_grid  # the tables are the same: sorted once
        return model

    def covers(self, other: "LatencyModel") -> bool:
        """Whether every time that `other` knows is known here."""
        return all(getattr(self, name) == getattr(other, name) for name in SHAPE) and all(
            getattr(other, name).keys() <= getattr(self, name).keys() for name in TABLES
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


def _plain(key: tuple) -> list:
    return [list(part) if isinstance(part, Split) else part for part in key]


def _from_plain(key: list) -> tuple:
    return tuple(Split(*part) if isinstance(part, list) else part for part in key)
