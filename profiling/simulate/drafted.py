"""What rows do in bursts with drafts: the tokens they generate, in how many steps, of which runs.

On average a row with copied drafts generates in each step what `Acceptance` expects of its
replica's room: a step's room divided by the rows that are live. The room goes where the planner
believes that drafts are right (`reach` of the burst), as on the devices. What it brings there is
the machine's own acceptance, or the sequence's where the workload has one for each. In that case
all live rows of a replica have the same room, and it goes where the machine's acceptance has drafts
right. Beliefs change with each burst, so that what steps come to is too dear to work out anew for
every acceptance. How many are live is looked at once in `check_every` steps. Sequences that begin
when siblings have finished have more of their drafts right at first: see `WORTH`.

A draft of a model is as long as the budget in every row, and a run of its own.

Tokens are whole. Parts of a token that a row is owed in a burst are kept for its next ones. Each
row begins with another part, so that those of a replica do not generate their extra tokens in the
same step. So a row's tokens are right to one, whenever they are counted, and so are the counts of
runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pat_jax.engine.orders import Burst
from pat_jax.engine.sequences.block_tables import BlockTables
from pat_jax.planning.draft_counts import DRAFTS, KINDS, MOST, NO_SOURCES, SAID, Drafted
from pat_jax.planning.drafts import Acceptance, Ways
from pat_jax.profiling.simulate.machine import Machine

GOLDEN = (5**0.5 - 1) / 2  # whose multiples leave no gaps: where rows begin
# In its first tokens a response has little of its own to draft from: more of their drafts are right where siblings
# had finished before it began, for each doubling of their number and one. Fitted to recorded responses, within
# 3 points for a policy in RL and five reasoning models; nearly equal samples gain more.
FIRST_TOKENS, WORTH = 512, 0.15
EPS = 1e-9  # of a token, by which sums of floats may fall short of a whole one


class Went(NamedTuple):
    """What each live sequence did in a burst, int[live]."""

    steps: int
    said: np.ndarray  # tokens
    live_steps: np.ndarray  # steps in which it was live
    pages: np.ndarray  # drawn
    drafted: Drafted  # as of one group


class DraftedRows:
    """Remembers the parts of tokens and of counts that bursts leave over."""

    def __init__(
        self, machine: Machine, tables: BlockTables, accepts: Sequence[Acceptance] | None = None
    ):
        """
        Args:
          accepts: of each sequence, see `Workload`.
        """
        self.machine, self.tables, self.table = machine, tables, tables.table
        self._kinds = [machine.acceptance] if accepts is None else list(dict.fromkeys(accepts))
        self._are_alike = accepts is None
        place = {one: i for i, one in enumerate(self._kinds)}
        self._kind = np.array([place[x] for x in accepts or self._kinds * len(self.table)], int)
        self._over = np.arange(len(self.table)) * GOLDEN % 1.0  # of a token, of each sequence
        # What steps come to, of each acceptance, by what was believed last: bursts that believe the same
        # share it.
        self._believed: np.ndarray | None = None
        self._ways: dict[int, Ways] = {}
        self._uncounted: list[np.ndarray] | None = None  # see `NONE_DRAFTED`
        # How many times as many tokens of drafts are right in the first tokens of those that began later.
        self._times = np.ones(len(self.table))
        self._has_begun = np.zeros(len(self.table), bool)

    def note_begun(self) -> None:
        """To be told before each burst: which siblings had ended when sequences begin."""
        table = self.table
        begins = table.live[~self._has_begun[table.live]]
        self._has_begun[begins] = True
        if self.machine.drafts.texts and table.has_prompt_ids and len(begins):
            whole = np.bincount(table.sibling, table.is_done)[table.sibling[begins]]
            self._times[begins] = 1 + WORTH * np.log2(1 + whole)

    def run(self, burst: Burst, left: np.ndarray, in_reserve: np.ndarray) -> Went:
        """
        Args:
          left: int[live], tokens that each will still say.
          in_reserve: int[groups], pages to be drawn.
        """
        table, pace = self.table, self.machine.pace(burst.shape.budget)
        live, every = table.live, pace.check_every
        group = table.group(live)
        kinds, kind = np.unique(self._kind[live], return_inverse=True)
        expected = [self._expected(burst, i) for i in kinds.tolist()]
        before = table.length[live] - table.prompt_length[live]
        said, live_steps, pages, steps = 0 * left, 0 * left, 0 * left, 0
        drafted = np.zeros(len(kinds))
        while steps < burst.max_steps:
            is_live = said < left
            of_group = np.bincount(group[is_live], minlength=table.num_groups)
            more = self._lacking(said, pages, is_live, pace.check_tokens)
            is_short = np.bincount(group, pages + more, len(in_reserve)) > in_reserve
            if of_group.max() <= burst.threshold or is_short.any():
                break
            pages += more
            times = np.where(before + said < FIRST_TOKENS, self._times[live], 1.0)
            tokens = np.stack([one.tokens(of_group) for one in expected])
            rate = 1 + times * (tokens[kind, group] - 1)
            new, took = self._said(live, rate, np.where(is_live, left - said, 0), every)
            said, live_steps, steps = said + new, live_steps + took, steps + every
            verified = np.stack([one.drafted(of_group) for one in expected])
            drafted += np.bincount(kind, verified[kind, group] * took, len(kinds))
        of_kind = np.bincount(kind, said, len(kinds))
        each = [one.counted(*x) for one, *x in zip(expected, of_kind, drafted, strict=True)]
        counts = [np.sum(x, axis=0) for x in zip(*each, strict=True)]
        return Went(steps, said, live_steps, pages, self._whole(counts))

    def _expected(self, burst: Burst, kind: int) -> "_Copied | _Said":
        """What rows do whose acceptance has that place in `_kinds`."""
        acceptance = self._kinds[kind]
        assert acceptance is not None and burst.reach is not None, "a burst with drafts"
        _, rows, _, budget = burst.shape
        if acceptance.is_said:
            return _Said(acceptance.reach[DRAFTS, SAID, : 1 + budget])
        of_all = self.machine.acceptance
        believed = burst.reach if self._are_alike or of_all is None else of_all.reach
        if self._believed is not believed:
            self._believed, self._ways = believed, {}
        if kind not in self._ways:
            self._ways[kind] = acceptance.ways(self.machine.drafts.longest, believed)
        return _Copied(acceptance, self._ways[kind], rows * (1 + budget))

    def _lacking(
        self, said: np.ndarray, pages: np.ndarray, is_live: np.ndarray, ahead: int
    ) -> np.ndarray:
        """Pages that each needs for its next tokens, or up to its end: see `page_append.lacking`."""
        table, tables = self.table, self.tables
        live = table.live
        tokens = np.minimum(table.length[live] - 1 + said + ahead, table.end[live] - 1)
        missing = -(-tokens // tables.page_size) - tables.count[live] - pages
        return np.where(is_live, np.maximum(missing, 0), 0)

    def _said(
        self, live: np.ndarray, rate: np.ndarray, left: np.ndarray, steps: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that each says in so many steps at most, and the steps until its last of them."""
        over = self._over[live]
        owed = over + steps * rate
        whole = np.floor(owed + EPS).astype(np.int64)
        is_over = left <= whole
        self._over[live] = np.where(left > 0, np.where(is_over, 0.0, owed - whole), over)
        until = np.maximum(np.ceil((left - over) / rate - EPS), 1).astype(np.int64)
        took = np.where(is_over, np.minimum(until, steps), steps)
        return np.minimum(whole, left), np.where(left > 0, took, 0)

    def _whole(self, counts: list[np.ndarray]) -> Drafted:
        """What is counted with this burst, and was not before."""
        before = self._uncounted or [0 * x for x in counts]
        owed = [a + b for a, b in zip(before, counts, strict=True)]
        whole = [np.floor(x + EPS).astype(np.int64) for x in owed]
        self._uncounted = [a - b for a, b in zip(owed, whole, strict=True)]
        return Drafted(*(x[None] for x in whole))


@dataclass(frozen=True)
class _Copied:
    """What groups do in a step on average, by how many of their rows are live."""

    acceptance: Acceptance
    ways: Ways
    room: int  # tokens of a step

    def tokens(self, live: np.ndarray) -> np.ndarray:
        """Of a row in a step, float[groups], by live rows of each group."""
        rows = np.maximum(live, 1)
        return np.asarray(self.ways.tokens(self.room / rows - 1, rows))

    def drafted(self, live: np.ndarray) -> np.ndarray:
        """Tokens of drafts that are verified for it."""
        rows = np.maximum(live, 1)
        return np.asarray(self.ways.drafted(self.room / rows - 1, rows))

    def counted(self, said: float, drafted: float) -> list[np.ndarray]:
        """Of steps in which so many tokens are said and verified, as `NONE_DRAFTED` has them; of what
        drafts are copied from nothing is known.

        Whatever steps verify of it, a run says all that is right of it and one token more, and all of these
        are counted.
        """
        share, reach, forks = self.acceptance.share, self.acceptance.reach, self.acceptance.forks
        begun = share * said / (1.0 + share @ reach[DRAFTS, :, 1:].sum(axis=1))
        beside = begun[:, None] * forks / forks.sum(axis=1, keepdims=True)
        came = np.stack([begun, (1 - reach[DRAFTS, :, 1]) @ beside])[:, :, None]
        tried = came * reach[..., :-1]
        tried[:, 0] = 0.0  # without a match nothing is there to be right
        return [begun, tried, came * reach[..., 1:], beside, np.array(drafted), NO_SOURCES]


@dataclass(frozen=True)
class _Said:
    """The same of drafts that a model says, all of them as long."""

    reach: np.ndarray  # float[1 + budget], P(the first tokens of a draft are right), of none first

    def tokens(self, live: np.ndarray) -> np.ndarray:
        return np.full(len(live), self.reach.sum())

    def drafted(self, live: np.ndarray) -> np.ndarray:
        return np.full(len(live), len(self.reach) - 1.0)

    def counted(self, said: float, drafted: float) -> list[np.ndarray]:
        budget = len(self.reach) - 1
        runs = drafted / budget
        begun, (tried, right) = np.zeros(KINDS), np.zeros((2, 2, KINDS, MOST))
        begun[SAID] = runs
        tried[DRAFTS, SAID, :budget] = runs * self.reach[:-1]
        right[DRAFTS, SAID, :budget] = runs * self.reach[1:]
        return [begun, tried, right, np.zeros((KINDS, KINDS)), np.array(drafted), NO_SOURCES]
