"""Simulates the verification of copied drafts on recorded responses, for many prompts at once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pat_jax.engine.sequences.texts import AHEAD_PART
from pat_jax.layout.buckets import LEAST_ROOM

Tokens = Sequence[int]
# Texts of others: siblings that have ended, earlier responses, siblings that have not. The engine
# drafts from them in this order.
ENDED, EARLIER, RUNNING = range(3)
NOWHERE = -1
NO_RUN = 0  # the run that finds nothing
# Tokens of the shortest length bucket; buckets double up to what the longest running row needs.
LEAST_BUCKET = 64


@dataclass(frozen=True)
class Group:
    """The responses to a prompt."""

    name: str  # set, and the model where a set has several
    prompt: Tokens
    responses: Sequence[Tokens]
    earlier: Sequence[Tokens]  # responses of an earlier policy


@dataclass(frozen=True)
class Rules:
    """The sources of drafts, and how much of them has room."""

    siblings: bool
    earlier: bool
    draft: int = 8  # most tokens of a draft
    # Most tokens of a branch, which begins with another token; 0: branches are counted, not taken.
    branch: int = 0
    # Steps for which a row sees its siblings as they were. 0: always as they are, the newest of
    # equal matches first, earlier responses last. Otherwise as the engine lays them out, in `room`.
    burst: int = 0
    room: float = 1e6  # of others, in multiples of the length bucket of rows


@dataclass(frozen=True, eq=False)
class Steps:
    """Verification steps in the order in which they are made, one entry each."""

    group: np.ndarray
    row: np.ndarray  # index of the response
    step: np.ndarray  # index of the step, which all rows make together
    matched: np.ndarray  # tokens of the match, 0 if there is none
    accepted: np.ndarray  # tokens of the draft that agree with the record
    beside: np.ndarray  # tokens of the branch's match
    branched: np.ndarray  # tokens of the branch that agree

    def __len__(self) -> int:
        return len(self.group)

    def of(self, chosen: np.ndarray | slice) -> "Steps":
        """The steps that a mask or a slice chooses."""
        return Steps(*(getattr(self, x.name)[chosen] for x in fields(self)))


class Record:
    """The texts of some prompts in one array: each response after its prompt, then the earlier
    responses likewise.

    A place is an index of that array. The runs before a place are the tokens that preceded it.

    Args:
      context: most tokens of a match.
    """

    def __init__(self, groups: Sequence[Group], context: int):
        self.context = context
        of_rows = [(i, g.prompt, text) for i, g in enumerate(groups) for text in g.responses]
        earlier = [(i, g.prompt, text) for i, g in enumerate(groups) for text in g.earlier]
        self.rows, found = len(of_rows), of_rows + earlier
        self.group = np.array([i for i, _, _ in found])
        lengths = np.array([len(prompt) + len(text) for _, prompt, text in found])
        self.stop = np.cumsum(lengths)
        self.start = self.stop - lengths
        prompts = np.array([len(prompt) for _, prompt, _ in found])
        self.known_tokens = self.start + prompts  # where responses begin
        self.text = np.repeat(np.arange(len(found)), lengths)  # of each place
        parts = [np.array([*prompt, *text], np.int64) for _, prompt, text in found]
        self.tokens = np.concatenate(parts)

    @cached_property
    def own_runs(self) -> np.ndarray:
        """int[places, context]: in column n, places of one text have equal numbers if the n + 1
        tokens before them are equal."""
        return self._runs(self.text)

    @cached_property
    def group_runs(self) -> np.ndarray:
        """As `own_runs`, for places of all texts of a prompt."""
        return self._runs(self.group[self.text])

    def _runs(self, owner: np.ndarray) -> np.ndarray:
        runs = np.full((len(self.tokens), self.context), NO_RUN, np.int32)
        # Tokens of the text before a place.
        behind = np.arange(len(self.tokens)) - self.start[self.text]
        places, known, first = np.arange(len(self.tokens)), owner.astype(np.int64), NO_RUN + 1
        for back in range(1, self.context + 1):
            has = behind[places] >= back
            places, known = places[has], known[has]
            if not len(places):
                break
            # A run is the shorter one and the token before it.
            longer = known * (1 + self.tokens.max()) + self.tokens[places - back]
            _, which, count = np.unique(longer, return_inverse=True, return_counts=True)
            # A run that occurs once is never found.
            again = count[which] > 1
            places, known = places[again], which[again]
            runs[places, back - 1] = first + known
            first += len(count)
        return runs


class _Seen:
    """The last place of each run, and its last place with a different next token. Places are told
    in the order in which they count."""

    def __init__(self, runs: np.ndarray, tokens: np.ndarray):
        self.runs, self.tokens = runs, tokens
        # The last, and the last that another token follows.
        self.place = np.full((2, 1 + runs.max(initial=NO_RUN)), NOWHERE, np.int64)

    def tell(self, places: np.ndarray) -> None:
        run = self.runs[places].ravel()
        place = np.repeat(places, self.runs.shape[1])
        last, other = self.place
        before = last[run]
        last[run] = place  # NumPy writes the last of equal indices
        newest = self.tokens[last[run]]
        for one in (before, place):
            differs = (one >= 0) & (self.tokens[one] != newest)
            other[run[differs]] = one[differs]
        self.place[:, NO_RUN] = NOWHERE

    def forget(self) -> None:
        self.place[:] = NOWHERE

    def before(self, places: np.ndarray) -> np.ndarray:
        """int[2, places, context], the places seen for the runs before these places."""
        return self.place[:, self.runs[places]]


def _spans(first: np.ndarray, behind: np.ndarray) -> np.ndarray:
    """The places of several spans, one after the other."""
    lengths = behind - first
    offset = np.repeat(first - np.cumsum(lengths) + lengths, lengths)
    return offset + np.arange(lengths.sum())


class _Lockstep:
    """All rows of a record, which make each verification step together."""

    def __init__(self, record: Record, rules: Rules):
        self.record, self.rules = record, rules
        rows = slice(record.rows)
        self.at, self.stop = record.known_tokens[rows].copy(), record.stop[rows]
        self.own = _Seen(record.own_runs, record.tokens)
        # A place counts once its token exists: a run is looked up for the token that follows it.
        self.own.tell(_spans(record.start[rows], self.at))
        is_laid_out = rules.burst > 0
        has_others = rules.siblings or (rules.earlier and is_laid_out)
        self.others = _Seen(record.group_runs, record.tokens) if has_others else None
        self.earlier: _Seen | None = None
        if rules.earlier and not is_laid_out:
            self.earlier, whole = _Seen(record.group_runs, record.tokens), slice(record.rows, None)
            self.earlier.tell(_spans(record.start[whole], record.stop[whole]))
        self.known = record.stop.copy()  # where each text ends for others
        self.known[rows] = self.at
        behind = np.full(rules.draft, NOWHERE)
        self.windows = sliding_window_view(np.concatenate([record.tokens, behind]), rules.draft)

    def launch(self) -> None:
        """Lays the texts of others out anew, as they are now."""
        record, others = self.record, self.others
        assert others is not None
        rows = record.rows
        others.forget()
        self.known[:rows], self.known[rows:] = self.at, record.stop[rows:]
        is_running = np.zeros(1 + record.group.max(), bool)
        is_running[record.group[:rows][self.at < self.stop]] = True
        text = np.flatnonzero(is_running[record.group])
        kind = np.full(len(record.group), EARLIER)
        kind[:rows] = np.where(self.at < self.stop, RUNNING, ENDED)
        text = text[np.where(kind[text] == EARLIER, self.rules.earlier, self.rules.siblings)]
        kind = kind[text]
        # Earlier responses keep their order: sorted by length they draft no better.
        length = np.where(kind == EARLIER, 0, self.known[text] - record.start[text])
        text = text[np.lexsort((-length, kind, record.group[text]))]  # the best first
        first = self._with_room(text)
        others.tell(_spans(first[::-1], self.known[text][::-1]))

    def _with_room(self, text: np.ndarray) -> np.ndarray:
        """Where the part of each text begins that has room; sets `known`, where it ends."""
        record, at, group = self.record, self.at, self.record.group[text]
        if not len(text):
            return text
        going_on = np.flatnonzero(at < self.stop)
        start, texts = record.start[: record.rows], self.rules.room
        bucket = self._bucket(int((at - start)[going_on].max()))
        longest = self._bucket(int((self.stop - start).max()))
        room = int(max(texts * bucket, min(LEAST_ROOM, texts * longest)))
        known_tokens = self.known[text] - record.known_tokens[text]
        total = np.bincount(group, known_tokens)
        farthest = np.zeros(len(total), np.int64)
        generated = at - record.known_tokens[: record.rows]
        np.maximum.at(farthest, record.group[going_on], generated[going_on])
        is_cut = total[group] > room
        ahead = farthest[group] + bucket // AHEAD_PART
        known_tokens = np.where(is_cut, np.minimum(known_tokens, ahead), known_tokens)
        self.known[text] = record.known_tokens[text] + known_tokens
        before = np.cumsum(known_tokens) - known_tokens
        begins = np.searchsorted(group, group)  # each group's first
        left = np.maximum(room - (before - before[begins]), 0)
        return self.known[text] - np.minimum(known_tokens, left)

    def _bucket(self, longest: int) -> int:
        """The length bucket of a row of `longest` tokens."""
        doublings = math.ceil(math.log2(max(1, longest) / LEAST_BUCKET))
        return LEAST_BUCKET * 2 ** max(0, doublings)

    def step(self) -> tuple[np.ndarray, ...]:
        """One step: the index of each running row, and its fields of `Steps` from `matched` on."""
        record, rules = self.record, self.rules
        row = np.flatnonzero(self.at < self.stop)
        at = self.at[row]
        matched, place = self._longest(at)
        beside, other = self._longest(at, but=np.where(matched > 0, record.tokens[place], NOWHERE))
        accepted, branched = self._accepted(row, matched, place), self._accepted(row, beside, other)
        is_accepted = np.where(accepted > 0, accepted, np.minimum(branched, rules.branch))
        then = np.minimum(at + is_accepted + 1, self.stop[row])
        known_tokens = _spans(at, then)
        self.own.tell(known_tokens)
        self.at[row] = then
        if self.others and not rules.burst:  # siblings see a step's tokens from the next one on
            self.others.tell(known_tokens)
            self.known[row] = then
        return row, matched, accepted, beside, branched

    def _accepted(self, row: np.ndarray, matched: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Tokens of the drafts, which begin at `place`, that agree with the record."""
        record, at = self.record, self.at[row]
        # A draft ends where its text does: a row's own text now, another's when it was laid out.
        source = record.text[place]
        until = np.where(source == row, at, self.known[source])
        column = np.arange(self.rules.draft)[None]
        is_accepted = self.windows[place] == self.windows[at]
        is_accepted &= place[:, None] + column < until[:, None]
        is_accepted &= at[:, None] + column < self.stop[row][:, None]
        is_accepted &= matched[:, None] > 0
        return np.cumprod(is_accepted, axis=1).sum(axis=1)

    def _longest(
        self, at: np.ndarray, but: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the longest match before each place `at`, and the place that follows it, whose
        token is not `but`."""
        found = np.full((len(at), self.record.context), NOWHERE)
        for seen in (self.own, self.others, self.earlier):
            if seen:
                last, other = seen.before(at)
                if but is not None:
                    last = np.where(self.record.tokens[last] == but[:, None], other, last)
                found = np.where(found < 0, last, found)
        matched = np.max((found >= 0) * np.arange(1, self.record.context + 1), axis=1)
        place = np.take_along_axis(found, np.maximum(matched - 1, 0)[:, None], axis=1)[:, 0]
        return matched, np.maximum(place, 0)


def verify(record: Record, rules: Rules) -> Steps:
    """Simulates all steps until every response is complete."""
    lockstep, found, step = _Lockstep(record, rules), [], 0
    while np.any(lockstep.at < lockstep.stop):
        if lockstep.others and rules.burst and step % rules.burst == 0:
            lockstep.launch()
        row, *of_drafts = lockstep.step()
        found.append((record.group[row], row, np.full(len(row), step), *of_drafts))
        step += 1
    if not found:
        return Steps(*(np.zeros(0, np.int64) for _ in fields(Steps)))
    return Steps(*(np.concatenate(x) for x in zip(*found, strict=True)))
