"""Simulates bursts with drafts: tokens generated, steps, and runs (see `planning/drafts.py`).

A row with copied drafts generates in each step what `Acceptance` predicts on average. The room for
draft tokens in a step is shared by the running rows of a replica. As on the devices, it goes to the
tokens that the planner predicts to be right (`accept_prob` of the burst). How many are right
follows the machine's acceptance, or each sequence's own if the workload has them. In that case the
machine's acceptance also decides which tokens get room: the planner's predictions change with each
burst, too often to compute steps anew for every acceptance.

The number of running rows is updated once in `check_every` steps. Sequences that begin after
siblings have finished have more right drafts at first: see `WORTH`.

A draft of a model has the burst's number of draft tokens in every row, and is a run of its own.

Rows generate whole tokens. The fraction of a token that is left after a burst is kept for the next
one. Each row begins with another fraction, so that the rows of a replica do not generate their
extra tokens in the same step. So a row's tokens are always right to within one, and so are the
counts of runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pat_jax.engine.executor import Burst
from pat_jax.engine.sequences.block_tables import BlockTables
from pat_jax.planning.draft_counts import DRAFTS, GENERATED, KINDS, MAX_RUN, NO_SOURCES, DraftResult
from pat_jax.planning.drafts import Acceptance, Ways
from pat_jax.profiling.simulate.machine import Machine

GOLDEN = (5**0.5 - 1) / 2  # its multiples spread the first fractions of rows evenly
# In its first tokens a response has little own text to draft from. If siblings had finished before
# it began, more of these drafts are right: by `WORTH` for each doubling of one plus their number.
# Fitted to recorded responses, within 3 points for a policy in RL and five reasoning models; nearly
# equal samples gain more.
FIRST_TOKENS = 512
WORTH = 0.15
EPS = 1e-9  # of a token: sums of floats may fall short of a whole token by this


class Went(NamedTuple):
    """The result of a burst, for each running sequence, int[running]."""

    steps: int
    generated: np.ndarray  # tokens generated
    running_steps: np.ndarray  # steps in which the sequence was running
    pages: np.ndarray  # pages drawn from the reserve
    drafted: DraftResult  # counts of all replicas, as if of one


class DraftedRows:
    """Simulates bursts with drafts. Carries fractions of tokens and counts from burst to burst."""

    def __init__(self, machine: Machine, tables: BlockTables, accepts: Sequence[Acceptance] | None):
        self.machine = machine
        self.tables = tables
        self.table = tables.table
        self._kinds = [machine.acceptance] if accepts is None else list(dict.fromkeys(accepts))
        self._are_alike = accepts is None
        place = {one: i for i, one in enumerate(self._kinds)}
        self._kinds_of = np.array([place[x] for x in accepts or self._kinds * len(self.table)], int)
        self._over = np.arange(len(self.table)) * GOLDEN % 1.0  # fraction of a token, by sequence
        # The tokens of steps for each acceptance, by the last predictions: bursts with equal
        # predictions share them.
        self._believed: np.ndarray | None = None
        self._ways: dict[int, Ways] = {}
        self._uncounted: list[np.ndarray] | None = None  # see `NONE_DRAFTED`
        # How many times as many draft tokens are right at first, in sequences that began later.
        self._times = np.ones(len(self.table))
        self._has_begun = np.zeros(len(self.table), bool)

    def note_begun(self) -> None:
        """Counts the siblings that had ended when sequences begin. Call it before each burst."""
        table = self.table
        begins = table.running[~self._has_begun[table.running]]
        self._has_begun[begins] = True
        if self.machine.drafts.texts and table.has_prompt_ids and len(begins):
            whole = np.bincount(table.sibling, table.is_done)[table.sibling[begins]]
            self._times[begins] = 1 + WORTH * np.log2(1 + whole)

    def run(self, burst: Burst, left: np.ndarray, in_reserve: np.ndarray) -> Went:
        """Simulates a burst, and returns its result.

        Args:
          left: int[running], tokens that each sequence will still generate.
          in_reserve: int[replicas], pages that rows of each replica may draw.
        """
        table = self.table
        pace = self.machine.pace(burst.shape.num_draft_tokens)
        replica = table.replica(table.running)
        self._begin(burst)
        generated, running_steps, pages = (np.zeros_like(left) for _ in range(3))
        steps = 0
        while steps < burst.max_steps:
            is_running = generated < left
            of_replica = np.bincount(replica[is_running], minlength=table.num_replicas)
            more = self._lacking(generated, pages, is_running, pace.check_tokens)
            is_short = np.bincount(replica, pages + more, len(in_reserve)) > in_reserve
            if of_replica.max() <= burst.threshold or is_short.any():
                break
            pages += more
            new, took = self._advance(generated, left, of_replica, pace.check_every)
            generated, running_steps = generated + new, running_steps + took
            steps += pace.check_every
        return Went(steps, generated, running_steps, pages, self._counted(generated))

    def _begin(self, burst: Burst) -> None:
        kinds, self._kind = np.unique(self._kinds_of[self.table.running], return_inverse=True)
        self._steps_of = [self._expected(burst, i) for i in kinds.tolist()]
        self._verified = np.zeros(len(kinds))

    def _advance(
        self, generated: np.ndarray, left: np.ndarray, of_replica: np.ndarray, steps: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Advances the rows of a burst by at most `steps`. Returns the tokens that each row
        generated, and the steps in which it ran.

        Args:
          generated: int[running], tokens of the burst so far.
          left: int[running], as in `run`.
          of_replica: int[replicas], rows that are still running.
        """
        table = self.table
        running = self.table.running
        replica = table.replica(running)
        before = table.length[running] - table.prompt_length[running]
        is_first = before + generated < FIRST_TOKENS
        times = np.where(is_first, self._times[running], 1.0)
        tokens = np.stack([one.tokens(of_replica) for one in self._steps_of])
        rate = 1 + times * (tokens[self._kind, replica] - 1)
        new, took = self._generate(running, rate, np.maximum(left - generated, 0), steps)
        verified = np.stack([one.drafted(of_replica) for one in self._steps_of])
        of_row = verified[self._kind, replica] * took
        self._verified += np.bincount(self._kind, of_row, len(self._verified))
        return new, took

    def _counted(self, generated: np.ndarray) -> DraftResult:
        """Returns the counts of a burst whose rows generated `generated` tokens, int[running]."""
        of_kind = np.bincount(self._kind, generated, len(self._verified))
        parts = zip(self._steps_of, of_kind, self._verified, strict=True)
        each = [steps.counted(tokens, verified) for steps, tokens, verified in parts]
        return self._whole([np.sum(x, axis=0) for x in zip(*each, strict=True)])

    def _expected(self, burst: Burst, kind: int) -> "_Copied | _Generated":
        """Returns the steps of rows whose acceptance is `_kinds[kind]`."""
        acceptance = self._kinds[kind]
        assert acceptance is not None and burst.accept_prob is not None, "a burst with drafts"
        _, rows, _, num_draft_tokens = burst.shape
        if acceptance.is_generated:
            return _Generated(acceptance.accept_prob[DRAFTS, GENERATED, : 1 + num_draft_tokens])
        of_all = self.machine.acceptance
        believed = burst.accept_prob if self._are_alike or of_all is None else of_all.accept_prob
        if self._believed is not believed:
            self._believed = believed
            self._ways = {}
        if kind not in self._ways:
            self._ways[kind] = acceptance.ways(self.machine.drafts.longest, believed)
        return _Copied(acceptance, self._ways[kind], rows * (1 + num_draft_tokens))

    def _lacking(
        self, generated: np.ndarray, pages: np.ndarray, is_running: np.ndarray, ahead: int
    ) -> np.ndarray:
        """Returns the pages that rows lack for `ahead` more tokens: see `page_append.lacking`."""
        table = self.table
        tables = self.tables
        running = table.running
        tokens = np.minimum(table.length[running] - 1 + generated + ahead, table.end[running] - 1)
        missing = -(-tokens // tables.page_size) - tables.count[running] - pages
        return np.where(is_running, np.maximum(missing, 0), 0)

    def _generate(
        self, running: np.ndarray, rate: np.ndarray, left: np.ndarray, steps: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of each row in at most `steps`, and the steps that it takes."""
        over = self._over[running]
        owed = over + steps * rate
        whole = np.floor(owed + EPS).astype(np.int64)
        is_over = left <= whole
        self._over[running] = np.where(left > 0, np.where(is_over, 0.0, owed - whole), over)
        until = np.maximum(np.ceil((left - over) / rate - EPS), 1).astype(np.int64)
        took = np.where(is_over, np.minimum(until, steps), steps)
        return np.minimum(whole, left), np.where(left > 0, took, 0)

    def _whole(self, counts: list[np.ndarray]) -> DraftResult:
        """Returns the whole counts after this burst; fractions are kept for the next one."""
        before = self._uncounted or [0 * x for x in counts]
        owed = [a + b for a, b in zip(before, counts, strict=True)]
        whole = [np.floor(x + EPS).astype(np.int64) for x in owed]
        self._uncounted = [a - b for a, b in zip(owed, whole, strict=True)]
        return DraftResult(*(x[None] for x in whole))


@dataclass(frozen=True)
class _Copied:
    """Steps with copied drafts: mean tokens of a row, by the running rows of its replica."""

    acceptance: Acceptance
    ways: Ways
    room: int  # tokens of all rows that a step computes

    def tokens(self, running: np.ndarray) -> np.ndarray:
        rows = np.maximum(running, 1)
        return np.asarray(self.ways.tokens(self.room / rows - 1, rows))

    def drafted(self, running: np.ndarray) -> np.ndarray:
        """Returns the draft tokens verified per row."""
        rows = np.maximum(running, 1)
        return np.asarray(self.ways.drafted(self.room / rows - 1, rows))

    def counted(self, generated: float, drafted: float) -> list[np.ndarray]:
        """Returns the counts of steps that generate and verify so many tokens, as in
        `NONE_DRAFTED`; those by source stay zero. No matter how much of a run each step verifies,
        the run generates all of its right tokens and one more, and all of them are counted."""
        share = self.acceptance.share
        accept_prob = self.acceptance.accept_prob
        branch_counts = self.acceptance.branch_counts
        begun = share * generated / (1.0 + share @ accept_prob[DRAFTS, :, 1:].sum(axis=1))
        beside = begun[:, None] * branch_counts / branch_counts.sum(axis=1, keepdims=True)
        came = np.stack([begun, (1 - accept_prob[DRAFTS, :, 1]) @ beside])[:, :, None]
        proposed = came * accept_prob[..., :-1]
        proposed[:, 0] = 0.0  # without a match nothing is there to be right
        return [begun, proposed, came * accept_prob[..., 1:], beside, np.array(drafted), NO_SOURCES]


@dataclass(frozen=True)
class _Generated:
    """Steps with drafts that a model generates, all of the same length; as `_Copied`."""

    # float[1 + num_draft_tokens], P(the first 0, 1, … tokens of a draft are right)
    accept_prob: np.ndarray

    def tokens(self, running: np.ndarray) -> np.ndarray:
        return np.full(len(running), self.accept_prob.sum())

    def drafted(self, running: np.ndarray) -> np.ndarray:
        return np.full(len(running), len(self.accept_prob) - 1.0)

    def counted(self, generated: float, drafted: float) -> list[np.ndarray]:
        num_draft_tokens = len(self.accept_prob) - 1
        runs = drafted / num_draft_tokens
        begun = np.zeros(KINDS)
        proposed, accepted = np.zeros((2, 2, KINDS, MAX_RUN))
        begun[GENERATED] = runs
        proposed[DRAFTS, GENERATED, :num_draft_tokens] = runs * self.accept_prob[:-1]
        accepted[DRAFTS, GENERATED, :num_draft_tokens] = runs * self.accept_prob[1:]
        return [begun, proposed, accepted, np.zeros((KINDS, KINDS)), np.array(drafted), NO_SOURCES]
