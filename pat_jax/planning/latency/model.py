"""Predicts seconds of steps, prefills and moves on a machine, from measured tables.

`profiling` makes the model. `observed` returns a model that is corrected by a burst of a run.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pat_jax.planning.latency.correction import Correction
from pat_jax.planning.latency.step_model import Numbers, Surface, migration
from pat_jax.planning.types import TEXTS, BurstResult, Reads, Split

ROUNDS = ("all", "one")  # rounds of a migration: every replica takes part, or one
TABLES = ("decode_table", "reshard_table", "migrate_table", "prefill_table", "verify_table")
SHAPE = ("prefill_blocks", "page_size", "round_tokens")  # sizes that entries refer to
READS = "reads"  # what the measured steps read of the KV cache
DRAFTS_FROM = "drafts_from"  # the source of the drafts that the measured steps verify


@dataclass(frozen=True)
class LatencyModel:
    """Measured and predicted seconds of the programs of an engine. Rows are those of one replica,
    lengths are cache lengths in tokens."""

    decode_table: Mapping[tuple[Split, int, int], float]  # (split, rows, length): one decode step
    reshard_table: Mapping[tuple[Split, Split], float]  # (from, to): all weights
    # (from, to, ROUNDS): one round of pages; (layout, itself, "all"): one between its replicas
    migrate_table: Mapping[tuple[Split, Split, str], float]
    prefill_table: Mapping[tuple[Split, int], float]  # (split, length): one prefill call
    prefill_blocks: int  # pages of a replica that one call computes
    page_size: int  # tokens of a page
    round_tokens: int  # tokens of a replica that one round of a migration moves
    reads: Reads = "bucket"
    # (split, rows, length, number of draft tokens): one step with room for that many draft tokens
    # per row, the time to propose them included.
    verify_table: Mapping[tuple[Split, int, int, int], float] = field(default_factory=dict)
    drafts_from: str = TEXTS  # the drafter of `verify_table`; seconds of different ones do not mix
    # Numbers of tokens in all replicas, ascending, and the seconds that the experts take for each.
    routed: tuple[np.ndarray, np.ndarray] = field(default=(np.zeros(1), np.zeros(1)), compare=False)
    # Learned from the step times that a run has measured.
    correction: Correction = field(default_factory=Correction, compare=False)

    @cached_property
    def decode(self) -> dict[Split, Surface]:
        """The profiled step time of each layout, by rows and length."""
        points = defaultdict(dict)
        for (split, rows, length), seconds in self.decode_table.items():
            points[split][rows, length] = seconds
        return {split: Surface(known) for split, known in points.items()}

    @cached_property
    def prefill(self) -> dict[Split, Surface]:
        """The profiled time of a prefill call of each layout, by its pages and context length."""
        points = defaultdict(dict)
        for (split, length), seconds in self.prefill_table.items():
            points[split][self.prefill_blocks, length] = seconds
        return {split: Surface(known) for split, known in points.items()}

    @cached_property
    def num_draft_tokens(self) -> tuple[int, ...]:
        """The numbers of draft tokens whose steps were measured, ascending."""
        return tuple(sorted({num_draft_tokens for *_, num_draft_tokens in self.verify_table}))

    @cached_property
    def _verifying(self) -> dict[int, "LatencyModel"]:
        tables = defaultdict(dict)
        for (*at, num_draft_tokens), seconds in self.verify_table.items():
            tables[num_draft_tokens][tuple(at)] = seconds
        tokens, seconds = self.routed
        return {
            n: replace(
                self, decode_table=table, verify_table={}, routed=(tokens / (1 + n), seconds)
            )
            for n, table in tables.items()
        }

    def verifying(self, num_draft_tokens: int) -> "LatencyModel":
        """Returns the model of steps that verify `num_draft_tokens` draft tokens per row. For 0, it
        is this model. Raises KeyError if no such step was measured."""
        return self._verifying[num_draft_tokens] if num_draft_tokens else self

    def of_drafts_from(self, source: str) -> "LatencyModel":
        """Returns this model. Its steps that verify drafts are left out if those drafts are not
        from `source`, because their times differ."""
        if self.drafts_from == source:
            return self
        return replace(self, verify_table={}, drafts_from=source)

    def decode_step(
        self,
        split: Split,
        rows: int,
        length: int,
        held: float | None = None,
        running: float = math.inf,
    ) -> float:
        """Returns the seconds of a decode step with `rows` rows in the fullest replica, and
        contexts of up to `length` tokens.

        Rows between two buckets run in the larger one and cost what it costs. So do lengths, if
        `reads` is "bucket". The seconds that all layouts take for each running sequence come on top
        (`Correction.per_sequence_s`).

        Args:
          held: tokens in the KV cache of the replica that holds most; by default `length` in each
            row.
          running: sequences of all replicas; empty rows go to no expert. By default none is empty.
        """
        profiled = self.profiled_step(split, rows, length, held, running)
        return profiled * self.correction.factor(split)

    def profiled_step(
        self,
        split: Split,
        rows: int,
        length: int,
        held: float | None = None,
        running: float = math.inf,
    ) -> float:
        """Returns the seconds of a `decode_step` by the profile alone, without the correction."""
        surface = self.decode[split]
        bucket, covered = surface.cover(rows, length)
        spared = float(self.spared(split.dp * bucket, running))
        if self.reads == "bucket":
            return surface(bucket, covered) - spared
        held = rows * length if held is None else held
        return surface.reading(bucket, length, held) - spared

    def spared(self, rows: Numbers, running: Numbers) -> Numbers:
        """Returns the seconds that a step of `rows` rows in all replicas saves in experts, if only
        `running` of these rows have sequences."""
        tokens, seconds = self.routed
        routed = np.minimum(running, rows)
        return np.interp(rows, tokens, seconds) - np.interp(routed, tokens, seconds)

    def migrate(
        self, source: Split, target: Split, fullest: Numbers, running: Numbers, context: Numbers
    ) -> Numbers:
        """Returns the seconds to migrate `running` sequences of `context` tokens each. The fullest
        replica has `fullest` of these sequences."""
        everybody, one = (self.migrate_table[(source, target, kind)] for kind in ROUNDS)
        seconds = migration(source.dp, target.dp, everybody, one, fullest, running)
        return context / self.round_tokens * seconds

    def shift_round(self, split: Split) -> float:
        """Returns the seconds of one round of pages between the replicas of a layout, or infinity
        if it was not measured."""
        return self.migrate_table.get((split, split, "all"), math.inf)

    def recompute(self, target: Split, rows: float, length: int) -> float:
        """Returns the seconds to prefill `rows` rows of `length` tokens in each replica of
        `target`. Lower positions come first, so most calls see shorter contexts than `length`. A
        smaller last call is priced as a whole one."""
        pages = -(-length // self.page_size)
        calls = math.ceil(rows * pages / self.prefill_blocks)
        done = 0
        seconds = 0.0
        for bucket in self.prefill[target].lengths:
            if bucket >= length:
                break
            upto = int(rows * bucket / self.page_size / self.prefill_blocks)
            seconds += (upto - done) * self.prefill_call(target, bucket)
            done = upto
        return seconds + (calls - done) * self.prefill_call(target, length)

    def packed(self, split: Split, replica: np.ndarray, tokens: np.ndarray) -> float:
        """Returns the seconds to prefill sequences: `tokens` has the length of each, `replica` its
        replica. A call is filled with pages of any sequences, lower positions first, in all
        replicas at once (`engine/sequences/prefill_calls.py`). Smaller last calls are priced as
        whole ones."""
        pages = -(-tokens // self.page_size)
        if not pages.any():
            return 0.0
        size = (int(replica.max()) + 1, int(pages.max()))
        is_last = np.zeros((size[0], size[1] + 1))
        np.add.at(is_last, (replica, pages), 1)
        # How many blocks a replica has up to each position, in pages.
        blocks = is_last[:, ::-1].cumsum(axis=1)[:, -2::-1].cumsum(axis=1)
        most = blocks[:, -1:]
        until = np.arange(1, math.ceil(most.max() / self.prefill_blocks) + 1) * self.prefill_blocks
        reach = [
            np.searchsorted(one, np.minimum(until, last)) * (until - self.prefill_blocks < last)
            for one, last in zip(blocks, most[:, 0], strict=True)
        ]
        position, calls = np.unique(np.max(reach, axis=0), return_counts=True)
        context = np.minimum((position + 1) * self.page_size, tokens.max())
        return sum(
            n * self.prefill_call(split, length)
            for n, length in zip(calls.tolist(), context.tolist(), strict=True)
        )

    def prefill_call(self, split: Split, length: int) -> float:
        """Returns the seconds of a call with `prefill_blocks` pages per replica, in contexts of up
        to `length` tokens."""
        surface = self.prefill[split]
        return surface(self.prefill_blocks, surface.cover(0, length)[1])

    def _on_drafts(
        self, rows: Mapping[Split, Sequence[int]], lengths: Sequence[int]
    ) -> dict[tuple[Split, int, int, int], float]:
        """Returns `verify_table` for these buckets. Rows beyond the measured ones are left out."""
        return {
            (split, n, length, num_draft_tokens): _grown(surface, self.decode[split], n, length)
            for num_draft_tokens in self.num_draft_tokens
            for split, surface in self.verifying(num_draft_tokens).decode.items()
            for n in rows.get(split, ())
            if n <= surface.rows[-1]
            for length in lengths
        }

    def on(self, rows: Mapping[Split, Sequence[int]], lengths: Sequence[int]) -> "LatencyModel":
        """Returns the model of an engine with these buckets, whose seconds are measured or
        interpolated.

        Other buckets of the profile are dropped: they would give some loads the time of a program
        that the engine does not have. A layout without measurements is left out.

        Args:
          rows: row buckets of one replica, by layout.
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
            verify_table=self._on_drafts(rows, lengths),
        )

    def observed(self, burst: BurstResult) -> "LatencyModel":
        """Returns the model corrected by a burst's measured step time, which may differ from the
        profile by heat, other processes or the host."""
        profiled = self.verifying(burst.num_draft_tokens).profiled_step(
            burst.split, burst.rows, burst.length, burst.held, burst.running
        )
        seen = self.correction.observed(burst.split, burst.running, profiled, burst.step_s)
        model = replace(self, correction=seen)
        # The tables are the same: sorted and fitted once.
        model.__dict__.update(decode=self.decode, _verifying=self._verifying)
        return model

    def covers(self, other: "LatencyModel") -> bool:
        """Returns whether this model has every time that `other` has. Moves between replicas of one
        layout do not count: where none was measured, none is made."""
        alike = (*SHAPE, READS, *[DRAFTS_FROM] * bool(other.verify_table))
        return all(getattr(self, name) == getattr(other, name) for name in alike) and all(
            {key for key in getattr(other, name) if name != "migrate_table" or key[0] != key[1]}
            <= getattr(self, name).keys()
            for name in TABLES
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the measured tables as values of JSON, without the corrections of a run."""
        tables = {name: list(getattr(self, name).items()) for name in TABLES}
        return {**tables, **{name: getattr(self, name) for name in (*SHAPE, READS, DRAFTS_FROM)}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LatencyModel":
        tables: dict[str, Any] = {
            name: {_from_plain(key): seconds for key, seconds in data[name]} for name in TABLES
        }
        return cls(**tables, **{name: data[name] for name in (*SHAPE, READS, DRAFTS_FROM)})


def _grown(drafted: Surface, plain: Surface, rows: int, length: int) -> float:
    """Returns the seconds of a step with drafts. Past the longest context that was measured with
    drafts, they grow by the seconds of a step without drafts, if those were measured."""
    known = drafted.lengths[-1]
    if length <= known or plain.lengths[-1] <= known:
        return drafted(rows, length)
    return drafted(rows, known) + plain(rows, length) - plain(rows, known)


def _from_plain(key: list) -> tuple:
    return tuple(Split(*part) if isinstance(part, list) else part for part in key)
