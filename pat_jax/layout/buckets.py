"""The few shapes that programs are compiled for: row buckets of each layout and context
lengths."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from pat_jax.models.config import ModelConfig
from pat_jax.planning.types import TEXTS, DraftLimits, Reads, Split


def ladder(smallest: int, largest: int) -> tuple[int, ...]:
    """Returns smallest, 2·smallest, 4·smallest … and `largest` itself."""
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
    """Returns `max_length` rounded up to a multiple of `min_length`: the largest length bucket."""
    return -(-max_length // min_length) * min_length


LEAST_ROOM = 2**14  # tokens of other texts, 64 KB a row


@dataclass(frozen=True)
class Drafts:
    """The drafter, and the numbers of draft tokens that have compiled programs."""

    # numbers of draft tokens per row that steps are compiled for; ascending
    num_draft_tokens: tuple[int, ...] = ()
    longest: int = 0  # the most tokens that a row's copied draft may have
    # Tokens that a step verifies on a replica, at most: more would cost as much as they gain.
    most_tokens: int = 0
    texts: int = 0  # room for other texts to draft from, as a multiple of the context length
    # The drafter: the policy's first `exit_layer` layers, or a draft model; without either, drafts
    # are copied from texts.
    exit_layer: int = 0
    has_model: bool = False
    cache_tokens: int = 2**16  # tokens that a draft model's cache has room for, per replica

    def of(self, rows: int) -> tuple[int, ...]:
        """Returns the numbers of draft tokens compiled for bursts with `rows` rows per replica.

        There are at most two, to compile little. Copied drafts use the two largest that fit,
        because a step with few rows can verify many tokens of each. Model drafts use the two
        smallest, because each token costs a pass and the first tokens are accepted most often.
        """
        fitting = tuple(n for n in self.num_draft_tokens if rows * (1 + n) <= self.most_tokens)
        return fitting[:2] if self.is_generated else fitting[-2:]

    def draft(self, num_draft_tokens: int) -> int:
        """Returns the most tokens that a row's draft may have in a step with `num_draft_tokens`.

        Copied drafts share the tokens that a step verifies: those likelier to be accepted get more.
        """
        return self.longest if num_draft_tokens and not self.is_generated else num_draft_tokens

    @property
    def most(self) -> int:
        """The most tokens that any draft may have."""
        return self.draft(self.num_draft_tokens[-1]) if self.num_draft_tokens else 0

    @property
    def limits(self) -> DraftLimits:
        return DraftLimits(self.longest, self.cache_tokens if self.has_model else math.inf)

    @property
    def is_generated(self) -> bool:
        """Whether a model generates the drafts, token by token. All rows' drafts then have the
        same length, the number of draft tokens."""
        return self.exit_layer > 0 or self.has_model

    def come_from(self, model: ModelConfig | None) -> str:
        """Returns the drafter in words. Steps with equally described drafters take the same time.

        Args:
          model: the configuration of the draft model, if there is one.
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
        """Returns how many tokens of other texts a row with `length` tokens may draft from.

        Up to LEAST_ROOM tokens, short contexts get as much room as the longest. This costs a step
        next to nothing, and requests that have just begun gain most from finished siblings.

        Args:
          longest: number of tokens of the longest context.
        """
        return max(self.texts * length, min(LEAST_ROOM, self.texts * longest))


NO_DRAFTS = Drafts()


class Limits(Protocol):
    """The rollout options that determine the buckets."""

    @property
    def min_rows(self) -> int: ...

    @property
    def min_length(self) -> int: ...

    @property
    def max_length(self) -> int: ...


class Shape(NamedTuple):
    """What a burst's program is compiled for."""

    split: Split
    rows: int  # row bucket of one replica
    length: int  # the most tokens in a row's KV cache
    num_draft_tokens: int = 0  # draft tokens of each row in a step

    @property
    def area(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Buckets:
    """The row buckets (rows of one replica) of each layout, and the context lengths in tokens.

    If programs read only what rows hold, a length is a context at which they are measured, and they
    are compiled for the longest alone.
    """

    rows: dict[Split, tuple[int, ...]]
    lengths: tuple[int, ...]
    reads: Reads = "bucket"

    @classmethod
    def of(
        cls, splits: Sequence[Split], capacity: int, limits: Limits, reads: Reads = "bucket"
    ) -> "Buckets":
        """Returns the buckets for `capacity` running sequences in all, over all replicas."""
        # Replicas that are full in the layout with most of them still fit when they have merged.
        widest = max(split.dp for split in splits)
        per_replica = {split: -(-capacity // widest) * widest // split.dp for split in splits}
        rows = {split: ladder(min(limits.min_rows, n), n) for split, n in per_replica.items()}
        longest = largest_length(limits.max_length, limits.min_length)
        return cls(rows, ladder(limits.min_length, longest), reads)

    @property
    def compiled(self) -> tuple[int, ...]:
        """The lengths that programs without drafts are compiled for."""
        return self.lengths if self.reads == "bucket" else self.lengths[-1:]

    def first(self, prompt_length: int, drafts: Drafts) -> "Buckets":
        """Returns the few buckets that are measured first, to predict the others from.

        Their row buckets are the smallest, the largest, and the largest for each number of draft
        tokens. Their length is that of a prompt and its first generated token. The longest is
        measured as well if it needs no other program.
        """
        longest = self.lengths[-1]
        length = smallest_at_least(self.lengths, min(prompt_length + 1, longest))
        lengths = sorted({length, longest} if self.reads == "held" else {length})

        def few(rows: Sequence[int]) -> tuple[int, ...]:
            of_number = {num_draft_tokens: n for n in rows for num_draft_tokens in drafts.of(n)}
            return tuple(sorted({rows[0], rows[-1], *of_number.values()}))

        rows = {split: few(rows) for split, rows in self.rows.items()}
        return replace(self, rows=rows, lengths=tuple(lengths))

    def rows_for(self, split: Split, needed: int) -> int:
        return smallest_at_least(self.rows[split], max(needed, 1))

    def rows_below(self, split: Split, rows: int) -> int:
        """Returns the next smaller row bucket, or 0 if there is none."""
        return max((n for n in self.rows[split] if n < rows), default=0)

    def draft_pages(self, split: Split, drafts: Drafts, page_size: int) -> int:
        """Returns the number of pages of a draft model's cache on one replica, NULL_PAGE included.

        They hold at least one sequence of full length, and at most what all rows with drafts can
        fill.
        """
        rows = max((n for n in self.rows[split] if drafts.of(n)), default=1)
        whole = -(-self.lengths[-1] // page_size)
        return 1 + max(whole, min(rows * whole, -(-drafts.cache_tokens // page_size)))

    def length_for(self, needed: int) -> int:
        """Returns the length of the program without drafts that holds `needed` tokens of a row."""
        return smallest_at_least(self.compiled, needed)


@dataclass(frozen=True)
class Pace:
    """How many steps a burst has, and how often it tests whether to end. With drafts it has fewer
    steps, because a step generates up to `draft` more tokens per row."""

    check_every: int  # steps between two tests of whether a burst ends
    burst_steps: int  # most steps of a burst
    draft: int  # the most draft tokens that a step verifies per row

    @classmethod
    def of(cls, check_every: int, burst_steps: int, draft: int) -> "Pace":
        """Returns the pace of bursts whose rows have drafts of up to `draft` tokens.

        Args:
          check_every, burst_steps: the fields' values for bursts without drafts.
        """
        if not draft:
            return cls(check_every, burst_steps, 0)
        # About as many tokens per check as without drafts, so that about as many are generated
        # after the burst could have ended.
        every = max(1, check_every // 2)
        return cls(every, max(1, burst_steps // 2 // every) * every, draft)

    @property
    def step_tokens(self) -> int:
        """The most tokens that a step generates for a row."""
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
    pages: Mapping[Split, int]  # number of pages in a replica's pool, by layout; NULL_PAGE counts
    page_size: int  # tokens of a page
    burst_steps: int  # most steps of a burst without drafts
    check_every: int  # steps between two tests of whether such a burst ends
    drafts: Drafts = NO_DRAFTS

    def pace(self, num_draft_tokens: int) -> Pace:
        return Pace.of(self.check_every, self.burst_steps, self.drafts.draft(num_draft_tokens))

    def lengths(self, num_draft_tokens: int) -> tuple[int, ...]:
        """Returns the lengths that bursts with this number of draft tokens are compiled for.

        Copied drafts are searched for in a row's whole room, whatever the row holds. So with them a
        shorter length, the longest with LEAST_ROOM, is compiled as well.
        """
        buckets = self.buckets
        if not num_draft_tokens or buckets.reads == "bucket" or self.drafts.is_generated:
            return buckets.compiled
        *shorter, longest = buckets.lengths
        texts = self.drafts.texts
        least = [n for n in shorter if texts * n <= LEAST_ROOM < texts * longest]
        return (*least[-1:], longest)

    def length_for(self, needed: int, num_draft_tokens: int) -> int:
        """Returns the length of the program that holds `needed` tokens of a row."""
        return smallest_at_least(self.lengths(num_draft_tokens), needed)

    @property
    def asked_ahead(self) -> int:
        """The number of future tokens of a row for which a draft model's cache reserves pages:
        those of two bursts. It is the same for all numbers of draft tokens, so that a row's need
        never shrinks."""
        return 2 * self.pace(max(self.drafts.num_draft_tokens, default=0)).burst_tokens

    def reserve_size(self, rows: int, num_draft_tokens: int = 0) -> int:
        """Returns how many new pages `rows` rows of a replica may need in two bursts, of which the
        second is dispatched while the first runs."""
        return rows * -(-2 * self.pace(num_draft_tokens).burst_tokens // self.page_size)
