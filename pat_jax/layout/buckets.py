"""The few shapes that programs are compiled for: row buckets of each layout, lengths of
contexts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pat_jax.models.config import ModelConfig
from pat_jax.planning.types import TEXTS, DraftLimits, Split


def ladder(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 2·smallest, 4·smallest … and `largest` itself."""
    steps = []
    step = smallest
    while step < largest:
        steps.append(step)
        step *= 2
    return (*steps, largest)


def smallest_at_least(steps: Sequence[int], needed: int) -> int:
    for step in steps:
        if step >= needed:
            return step
    raise ValueError(f"no bucket of {tuple(steps)} holds {needed}.")


def largest_length(max_length: int, min_length: int) -> int:
    """Tokens of the largest length bucket, for contexts of at most `max_length` tokens."""
    return -(-max_length // min_length) * min_length


LEAST_ROOM = 2**14  # columns, 64 KB a row


@dataclass(frozen=True)
class Drafts:
    """Which drafts have programs."""

    # tokens that a step has room for, for each row; ascending
    num_draft_tokens: tuple[int, ...] = ()
    longest: int = 0  # tokens of a row's draft
    most_tokens: int = 0  # of a replica, that a step verifies: with more they cost what they bring
    texts: int = 0  # tokens beside a row's own text to draft from, in lengths of its context
    # Who generates drafts: the policy's first layers, so many of them, or a draft model; else they
    # are copied from texts.
    exit_layer: int = 0
    has_model: bool = False
    cache_tokens: int = 2**16  # of a replica's sequences, that a draft model's cache has room for
    stagger: bool = (
        False  # whether samples of a prompt begin one after the other where sequences wait
    )

    def of(self, rows: int) -> tuple[int, ...]:
        """Numbers of draft tokens that bursts of so many rows of a replica may have: few, so that
        little is compiled.

        Copied drafts have the two largest that fit, because fewer rows verify more for each. Drafts
        of a model have the two smallest, because each token costs a pass and the first are right
        most often.
        """
        fitting = tuple(n for n in self.num_draft_tokens if rows * (1 + n) <= self.most_tokens)
        return fitting[:2] if self.is_generated else fitting[-2:]

    def draft(self, num_draft_tokens: int) -> int:
        """Most tokens of a row's draft. Copied ones share the room of a step by what they are
        worth."""
        return self.longest if num_draft_tokens and not self.is_generated else num_draft_tokens

    @property
    def most(self) -> int:
        """Tokens of the longest draft."""
        return self.draft(self.num_draft_tokens[-1]) if self.num_draft_tokens else 0

    @property
    def limits(self) -> DraftLimits:
        return DraftLimits(self.longest, self.cache_tokens if self.has_model else math.inf)

    @property
    def is_generated(self) -> bool:
        """By a model, token by token: every row's draft is as long as the number of draft
        tokens."""
        return self.exit_layer > 0 or self.has_model

    def come_from(self, model: ModelConfig | None) -> str:
        """What finds or generates them, for people; equal where they take the same time.

        Args:
          model: a draft model's configuration, where one generates them.
        """
        if self.exit_layer:
            return (
                f"the first {self.exit_layer} layers" if self.exit_layer > 1 else "the first layer"
            )
        if model is None:
            return TEXTS
        heads = f"{model.num_heads} and {model.num_kv_heads} heads of {model.head_dim}"
        sizes = f"{model.embed_dim} and {model.mlp_dim} wide, {heads}"
        return f"a model of {model.num_layers} layers, {sizes}"

    def text_room(self, length: int, longest: int) -> int:
        """Columns of others' texts that a row of `length` tokens drafts from.

        Short contexts have as much room as the longest, if that is little. It costs a step next to
        nothing, and siblings that have ended are worth most to those that have just begun.

        Args:
          longest: tokens of the longest context.
        """
        return max(self.texts * length, min(LEAST_ROOM, self.texts * longest))


NO_DRAFTS = Drafts()


class Limits(Protocol):
    """What the options of a rollout say of its buckets."""

    @property
    def min_rows(self) -> int: ...

    @property
    def min_length(self) -> int: ...

    @property
    def max_length(self) -> int: ...


class Shape(NamedTuple):
    """What a burst's program is compiled for."""

    split: Split
    rows: int  # bucket of a replica
    length: int  # tokens that a row's cache may come to hold
    num_draft_tokens: int = 0  # draft tokens of a step, for each row

    @property
    def area(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Buckets:
    """Row buckets (rows of one replica) by split, and context lengths in tokens."""

    rows: dict[Split, tuple[int, ...]]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, splits: Sequence[Split], capacity: int, limits: Limits) -> "Buckets":
        """Those of a rollout with these options, `capacity` sequences in all."""
        return cls.build(
            splits,
            capacity=capacity,
            min_rows=limits.min_rows,
            min_length=limits.min_length,
            max_length=limits.max_length,
        )

    @classmethod
    def build(
        cls,
        splits: Sequence[Split],
        *,
        capacity: int,
        min_rows: int,
        min_length: int,
        max_length: int,
    ) -> "Buckets":
        """`capacity` sequences in all."""
        # Replicas that are full in the layout with most of them still fit when they have merged.
        widest = max(split.dp for split in splits)
        per_replica = {split: -(-capacity // widest) * widest // split.dp for split in splits}
        rows = {split: ladder(min(min_rows, n), n) for split, n in per_replica.items()}
        return cls(rows, ladder(min_length, largest_length(max_length, min_length)))

    def first(self, prompt_length: int, drafts: Drafts) -> "Buckets":
        """The few that tell what the others take: the fewest and the most rows, and the most for
        each number of draft tokens, at the length of the first tokens behind a prompt."""
        length = self.length_for(min(prompt_length + 1, self.lengths[-1]))

        def few(rows: Sequence[int]) -> tuple[int, ...]:
            of_number = {num_draft_tokens: n for n in rows for num_draft_tokens in drafts.of(n)}
            return tuple(sorted({rows[0], rows[-1], *of_number.values()}))

        return Buckets({split: few(rows) for split, rows in self.rows.items()}, (length,))

    def rows_for(self, split: Split, needed: int) -> int:
        return smallest_at_least(self.rows[split], max(needed, 1))

    def rows_below(self, split: Split, rows: int) -> int:
        """The next smaller row bucket, 0 where there is none."""
        return max((n for n in self.rows[split] if n < rows), default=0)

    def draft_pages(self, split: Split, drafts: Drafts, page_size: int) -> int:
        """Pages of a replica's cache of a draft model, NULL_PAGE among them.

        They are enough for one sequence of full length, and at most what all rows that may draft
        can fill.
        """
        rows = max((n for n in self.rows[split] if drafts.of(n)), default=1)
        whole = -(-self.lengths[-1] // page_size)
        return 1 + max(whole, min(rows * whole, -(-drafts.cache_tokens // page_size)))

    def length_for(self, needed: int) -> int:
        return smallest_at_least(self.lengths, needed)


@dataclass(frozen=True)
class Pace:
    """How far a burst goes. A step with drafts generates up to `draft` tokens more, so that a burst
    has fewer steps."""

    check_every: int  # steps between two tests of whether a burst ends
    burst_steps: int  # most steps of a burst
    draft: int  # tokens of a row, at most, that a step verifies besides the newest

    @classmethod
    def of(cls, check_every: int, burst_steps: int, draft: int) -> "Pace":
        """
        Args:
          check_every, burst_steps: of bursts without drafts.
        """
        if not draft:
            return cls(check_every, burst_steps, 0)
        # About as many tokens, and so about as much that is lost behind a threshold.
        every = max(1, check_every // 2)
        return cls(every, max(1, burst_steps // 2 // every) * every, draft)

    @property
    def step_tokens(self) -> int:
        """Most tokens that a step generates for a row."""
        return 1 + self.draft

    @property
    def check_tokens(self) -> int:
        return self.check_every * self.step_tokens

    @property
    def burst_tokens(self) -> int:
        return self.burst_steps * self.step_tokens


@dataclass(frozen=True)
class Shapes:
    """What the programs of a rollout are compiled for."""

    buckets: Buckets
    pages: Mapping[Split, int]  # of a replica's pool in each layout, NULL_PAGE among them
    page_size: int  # tokens
    burst_steps: int  # most steps of a burst without drafts
    check_every: int  # steps between two of its tests of whether it ends
    drafts: Drafts = NO_DRAFTS

    def pace(self, num_draft_tokens: int) -> Pace:
        return Pace.of(self.check_every, self.burst_steps, self.drafts.draft(num_draft_tokens))

    @property
    def asked_ahead(self) -> int:
        """Tokens of a row that a draft model's cache has room for ahead: those of two bursts,
        whatever their number of draft tokens, so that what a row needs never shrinks."""
        return 2 * self.pace(max(self.drafts.num_draft_tokens, default=0)).burst_tokens

    def reserve_size(self, rows: int, num_draft_tokens: int = 0) -> int:
        """Pages that `rows` of a replica may draw in two bursts, one dispatched behind the
        other."""
        return rows * -(-2 * self.pace(num_draft_tokens).burst_tokens // self.page_size)
