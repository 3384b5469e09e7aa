"""What things cost on this machine: measured tables, and what follows from them for the rest.

Made by `profiling`, handed over by value. `observed` returns a model corrected by what a run saw.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pat_jax.planning.latency.correction import Correction
from pat_jax.planning.latency.step_model import Surface
from pat_jax.planning.types import TEXTS, BurstResult, Reads, Split

Numbers = float | np.ndarray
ROUNDS = ("all", "one")  # rounds of a migration: every replica takes part, or one
TABLES = ("decode_table", "reshard_table", "migrate_table", "prefill_table", "verify_table")
OLD_KEYS = {"reslice_table": "reshard_table"}  # of profiles from before 0.1.0
SHAPE = ("prefill_blocks", "page_size", "round_tokens")  # what one entry of a table does
READS = "reads"  # and what of the KV cache its steps read
DRAFTS_FROM = "drafts_from"  # and where the drafts are from that they verify


def migration(
    source_dp: Numbers,
    target_dp: Numbers,
    everybody: Numbers,
    one: Numbers,
    fullest: Numbers,
    running: Numbers,
) -> Numbers:
    """Seconds of a migration of `running` sequences with the pages of one round each.

    As far as replicas are alike they move pages in the same rounds, of `everybody` seconds; the
    others move `one` by one (`engine/relocation/rounds.py`). The fullest replica and the mean are
    known here: the emptiest is taken to lack what the fullest has more. Replicas split evenly.
    """
    replicas = np.maximum(source_dp, target_dp)
    mean = running / replicas
    alike = np.where(target_dp > source_dp, mean, np.maximum(0.0, 2 * mean - fullest))
    return alike * everybody + (running - replicas * alike) * one


@dataclass(frozen=True)
class LatencyModel:
    """Seconds. Rows are those of one replica, lengths are cache lengths in tokens."""

    decode_table: Mapping[tuple[Split, int, int], float]  # (split, rows, length): one decode step
    reshard_table: Mapping[tuple[Split, Split], float]  # (from, to): all weights
    # (from, to, ROUNDS): one round of pages; (layout, itself, "all"): to another replica of it
    migrate_table: Mapping[tuple[Split, Split, str], float]
    prefill_table: Mapping[tuple[Split, int], float]  # (split, length): one prefill call
    prefill_blocks: int  # pages of a replica that one call computes
    page_size: int  # tokens
    round_tokens: int  # of a replica, that one round of a migration moves
    reads: Reads = "bucket"
    # (split, rows, length, number of draft tokens): one step with room for so many tokens of drafts
    # for each row. What finds or says these drafts is in it.
    verify_table: Mapping[tuple[Split, int, int, int], float] = field(default_factory=dict)
    drafts_from: str = TEXTS  # of `verify_table`, for people; equal where its entries mean the same
    # What a run has seen of step times.
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
        """The time of a prefill call of each layout, by blocks of the call and length."""
        points = defaultdict(dict)
        for (split, length), seconds in self.prefill_table.items():
            points[split][self.prefill_blocks, length] = seconds
        return {split: Surface(known) for split, known in points.items()}

    @cached_property
    def num_draft_tokens(self) -> tuple[int, ...]:
        """Those of drafts whose steps were measured, ascending."""
        return tuple(sorted({num_draft_tokens for *_, num_draft_tokens in self.verify_table}))

    @cached_property
    def _verifying(self) -> dict[int, "LatencyModel"]:
        tables = defaultdict(dict)
        for (*at, num_draft_tokens), seconds in self.verify_table.items():
            tables[num_draft_tokens][tuple(at)] = seconds
        return {
            num_draft_tokens: replace(self, decode_table=table, verify_table={})
            for num_draft_tokens, table in tables.items()
        }

    def verifying(self, num_draft_tokens: int) -> "LatencyModel":
        """The same machine whose steps verify so many draft tokens for each row; 0: itself.

        Raises:
          KeyError: none was measured.
        """
        return self._verifying[num_draft_tokens] if num_draft_tokens else self

    def of_drafts_from(self, source: str) -> "LatencyModel":
        """The same, without steps that verify drafts from elsewhere: those take another time."""
        if self.drafts_from == source:
            return self
        return replace(self, verify_table={}, drafts_from=source)

    def decode_step(self, split: Split, rows: int, length: int, held: float | None = None) -> float:
        """One decode step: `rows` running in the fullest replica, contexts up to `length`.

        Rows between two buckets run in the larger one, and cost what that one costs; so do lengths,
        where it is buckets that are read. What all layouts pay for each running sequence comes on
        top (`Correction.per_sequence_s`).

        Args:
          held: tokens in the caches of the replica that holds most; `length` in each row where not
            given.
        """
        return self.profiled_step(split, rows, length, held) * self.correction.factor(split)

    def profiled_step(
        self, split: Split, rows: int, length: int, held: float | None = None
    ) -> float:
        """The same, as the profile has it."""
        surface = self.decode[split]
        bucket, covered = surface.cover(rows, length)
        if self.reads == "bucket":
            return surface(bucket, covered)
        return surface.reading(bucket, length, rows * length if held is None else held)

    def tokens_read(self, burst: BurstResult) -> float:
        """Tokens of the KV cache that the replica which reads most reads in a step of the burst."""
        return burst.rows * burst.length if self.reads == "bucket" else burst.held

    def reshard(self, source: Split, target: Split) -> float:
        return self.reshard_table[(source, target)]

    def migrate(
        self, source: Split, target: Split, fullest: Numbers, running: Numbers, context: Numbers
    ) -> Numbers:
        """The pages of `running` sequences of `context` tokens, `fullest` in one replica."""
        everybody, one = (self.migrate_table[(source, target, kind)] for kind in ROUNDS)
        seconds = migration(source.dp, target.dp, everybody, one, fullest, running)
        return context / self.round_tokens * seconds

    def shift_round(self, split: Split) -> float:
        """One round of pages between replicas of a layout; infinite if not measured."""
        return self.migrate_table.get((split, split, "all"), math.inf)

    def recompute(self, target: Split, rows: float, length: int) -> float:
        """Prefill of `rows` rows a replica, each of `length` tokens, in `target`.

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

    def packed(self, split: Split, replica: np.ndarray, tokens: np.ndarray) -> float:
        """Prefill of sequences of so many `tokens`, int[sequences], in their replicas.

        A call is filled with pages of any sequences, lower positions first, in all replicas at once
        (`engine/sequences/prefill_calls.py`). Smaller calls for what is left are priced as whole
        ones.
        """
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
        """One call of `prefill_blocks` blocks a replica, in contexts of up to `length` tokens."""
        surface = self.prefill[split]
        return surface(self.prefill_blocks, surface.cover(0, length)[1])

    def _on_drafts(
        self, rows: Mapping[Split, Sequence[int]], lengths: Sequence[int]
    ) -> dict[tuple[Split, int, int, int], float]:
        """`verify_table` for these buckets, up to the rows measured with each number of tokens."""
        return {
            (split, n, length, num_draft_tokens): surface(n, length)
            for num_draft_tokens in self.num_draft_tokens
            for split, surface in self.verifying(num_draft_tokens).decode.items()
            for n in rows.get(split, ())
            if n <= surface.rows[-1]
            for length in lengths
        }

    def on(self, rows: Mapping[Split, Sequence[int]], lengths: Sequence[int]) -> "LatencyModel":
        """What an engine with these buckets costs: as measured where they were, else predicted.

        A profile may hold other buckets as well. No load runs in them here, so they go: taken for
        the one that covers a load, they would give it the time of a program that is not there.

        A layout of which nothing has been measured is left out.

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
        """Corrected by what the steps of a burst took: drift, heat, a noisy neighbour, the host."""
        profiled = self.verifying(burst.num_draft_tokens).profiled_step(
            burst.split, burst.rows, burst.length, burst.held
        )
        seen = self.correction.observed(burst.split, burst.running, profiled, burst.step_s)
        model = replace(self, correction=seen)
        # The tables are the same: sorted and fitted once.
        model.__dict__.update(decode=self.decode, _verifying=self._verifying)
        return model

    def covers(self, other: "LatencyModel") -> bool:
        """Whether every time that `other` knows is known here.

        Not of moves between replicas of a layout: where none is known, none is made.
        """
        alike = (*SHAPE, READS, *[DRAFTS_FROM] * bool(other.verify_table))
        return all(getattr(self, name) == getattr(other, name) for name in alike) and all(
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
        return {**tables, **{name: getattr(self, name) for name in (*SHAPE, READS, DRAFTS_FROM)}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LatencyModel":
        data = {OLD_KEYS.get(key, key): value for key, value in data.items()}
        tables: dict[str, Any] = {
            name: {_from_plain(key): seconds for key, seconds in data[name]} for name in TABLES
        }
        return cls(**tables, **{name: data[name] for name in (*SHAPE, READS, DRAFTS_FROM)})


def _plain(key: tuple) -> list:
    return [list(part) if isinstance(part, Split) else part for part in key]


def _from_plain(key: list) -> tuple:
    return tuple(Split(*part) if isinstance(part, list) else part for part in key)
