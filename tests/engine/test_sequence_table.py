"""The table of sequences, held against a cache of labels that follows the same moves."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from bursts import burst_output, retire
from fakes import SPLITS
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pat_jax.engine.sequences.responses import Request, Responses
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.engine.sequences.sequence_table import NO_ROW, NO_SEQUENCE, SequenceTable

BURST = 4


def make_request(number: int, prompt_length: int, max_new_tokens: int) -> Request:
    key = np.array([number, 7], np.uint32)
    tokens = tuple(range(100 * number, 100 * number + prompt_length))
    return Request(
        tokens,
        key,
        max_new_tokens,
        sampling=Sampling(temperature=number / 4, top_k=number, top_p=0.5),
        prompt_id=90 - number // 2,
    )


def dealt(requests: list[Request], num_groups: int, rows: int) -> Responses:
    """Of sequences that are live, as many of them as there are rows; neighbours share a group."""
    responses = Responses.of(requests, num_groups=num_groups, rows_per_group=rows)
    each = min(rows, -(-len(requests) // num_groups))
    group = np.repeat(np.arange(num_groups), each)[: len(requests)]
    responses.table.enter(np.arange(len(group)), group)
    return responses


class Moves(RuleBasedStateMachine):
    """`labels[row]` says which sequence's cache is in a row: the devices' side of each move."""

    @initialize(
        lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=20),
        split=st.sampled_from(SPLITS),
    )
    def begin(self, lengths, split):
        self.requests = [make_request(i, *both) for i, both in enumerate(lengths)]
        self.split = split
        self.responses = dealt(self.requests, split.dp, rows=-(-len(lengths) // split.dp))
        self.table = self.responses.table
        self.said = [[] for _ in lengths]
        self.rng = np.random.default_rng(len(lengths))
        self.prefill()

    def prefill(self):
        self.labels = np.full(self.split.dp * self.table.rows_per_group, NO_SEQUENCE)
        self.labels[self.table.row[self.table.live]] = self.table.live
        self.version = self.table.version

    has_work = precondition(lambda self: self.table.has_work)

    @has_work
    @rule(data=st.data())
    def retire(self, data):
        """A burst: every live row says up to BURST tokens, some end before."""
        rows = len(self.labels)
        tokens = self.rng.integers(0, 61, (rows, BURST)).astype(np.int32)
        emitted, live = np.zeros(rows, np.int32), np.zeros(rows, bool)
        for i in self.table.live:
            row = self.table.row[i]
            left = int(self.table.end[i] - self.table.length[i])
            emitted[row] = data.draw(st.integers(1, min(BURST, left)))
            live[row] = emitted[row] < left and data.draw(st.booleans())
            self.said[i] += tokens[row, : emitted[row]].tolist()
        retire(self.responses, burst_output(tokens, -tokens.astype(np.float32), emitted, live))
        assert self.table.version == self.version, "nothing that the devices do not know"

    @has_work
    @rule(spare=st.integers(0, 5))
    def compact(self, spare):
        """Each group's sequences in its first rows, in the order in which they were."""
        rows, is_live = self.table.fullest + spare, np.isin(self.labels, self.table.live)
        compacted = np.full((self.split.dp, rows), NO_SEQUENCE)
        for group, (labels, is_kept) in enumerate(
            zip(*(x.reshape(self.split.dp, -1) for x in (self.labels, is_live)), strict=True)
        ):
            compacted[group, : is_kept.sum()] = labels[is_kept]
        self.table.compact(rows)
        assert self.table.version > self.version
        self.labels, self.version = compacted.reshape(-1), self.table.version

    @has_work
    @rule(to=st.sampled_from(SPLITS), spare=st.integers(0, 3), data=st.data())
    def switch(self, to, spare, data):
        """Any mixture of sequences that migrate and sequences that are recomputed."""
        live, before = self.table.live, self.table.num_groups
        old = self.table.row[live] // self.table.rows_per_group
        chosen = st.lists(st.booleans(), min_size=len(live), max_size=len(live))
        is_recomputed = np.array(data.draw(chosen), bool)
        new = self.table.regroup(to.dp, is_recomputed)
        fullest = int(np.bincount(new).max())
        self.table.seat(new, num_groups=to.dp, rows_per_group=fullest + spare)
        np.testing.assert_array_equal(self.table.row[live] // self.table.rows_per_group, new)
        # Who migrates stays with a device that has part of it.
        fewer = min(before, to.dp)
        assert ((old % fewer == new % fewer) | is_recomputed).all()
        if is_recomputed.all():
            assert fullest == -(-len(live) // to.dp)
        if not is_recomputed.any() and to.dp > before:
            ratio = to.dp // before
            assert fullest == -(-int(np.bincount(old).max()) // ratio)
        assert self.table.version > self.version
        self.split = to
        self.prefill()

    @precondition(lambda self: not self.table.has_work)
    @rule()
    def rest(self):
        assert len(self.table.live) == 0

    @invariant()
    def every_live_sequence_is_in_one_row_of_its_own(self):
        live = self.table.live
        rows = self.table.row[live]
        assert len(set(rows.tolist())) == len(live)
        np.testing.assert_array_equal(self.labels[rows], live)
        assert (self.table.row[self.table.is_done] == NO_ROW).all()
        self.table.check_integrity()

    @invariant()
    def tokens_are_as_they_were_said(self):
        for i, done in enumerate(self.responses.completions(eos_ids=())):
            assert done.tokens.tolist() == self.said[i]
            np.testing.assert_array_equal(done.logprobs, -np.array(self.said[i], np.float32))
            assert self.responses.tokens[i, : len(self.requests[i].tokens)].tolist() == list(
                self.requests[i].tokens
            )

    @invariant()
    def rows_and_load_say_the_same(self):
        rows, load = self.responses.row_state(), self.table.load()
        assert rows.live.sum() == load.live == len(self.table.live)
        assert load.prompt is not None  # every request has the id of its prompt
        groups = Counter(load.group.tolist())
        assert max(groups.values(), default=0) == (self.table.fullest if self.table.has_work else 0)
        for n, i in enumerate(self.table.live):
            row, request = self.table.row[i], self.requests[i]
            known = [*request.tokens, *self.said[i]]
            assert rows.last_token[row] == known[-1]
            assert rows.position[row] == load.context[n] == len(known) - 1
            assert rows.end[row] == len(request.tokens) + request.max_new_tokens
            assert load.generated[n] == len(self.said[i])
            assert load.budget[n] == request.max_new_tokens - len(self.said[i])
            assert rows.key[row].tolist() == request.key.tolist()
            drawn, asked = rows.sampling, request.sampling
            assert (drawn.temperature[row], drawn.top_k[row]) == (asked.temperature, asked.top_k)
            assert load.group[n] == row // self.table.rows_per_group
            assert self.table.prompt_id[load.prompt[n]] == request.prompt_id


TestMoves = Moves.TestCase


def make_table(count: int, num_groups: int, rows: int) -> SequenceTable:
    return dealt([make_request(i, 2, 5) for i in range(count)], num_groups, rows).table


def test_a_request_of_no_known_prompt_leaves_all_strangers():
    requests = [make_request(0, 2, 5), replace(make_request(1, 2, 5), prompt_id=None)]
    for some, is_known in ((requests[:1], True), (requests, False), ([], True)):
        table = Responses.of(some, num_groups=1, rows_per_group=2).table
        assert (table.load().prompt is not None) == is_known


def test_those_that_enter_get_the_rows_of_the_ended():
    responses = dealt([make_request(i, 2, 5) for i in range(9)], num_groups=2, rows=3)
    table = responses.table
    assert table.live.tolist() == [0, 1, 2, 3, 4, 5] and table.load().waiting == 3
    ended = np.array([0, 1, 5])
    rows = table.row[ended]
    tokens, live = np.zeros((6, 1), np.int32), ~np.isin(np.arange(6), rows)
    retire(responses, burst_output(tokens, tokens.astype(np.float32), np.ones(6, int), live))
    assert table.waiting.tolist() == [6, 7, 8] and table.load().step == 1
    table.enter(np.array([6, 7, 8]), np.array([0, 0, 1]))
    assert sorted(table.row[[6, 7, 8]]) == sorted(rows)
    assert len(table.waiting) == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_too_many_sequences_are_refused(rows):
    table = make_table(9, num_groups=4, rows=3)
    with pytest.raises(ValueError, match=f"3 sequences do not fit a group of {rows} rows"):
        table.seat(np.arange(9) % 4, num_groups=4, rows_per_group=rows)
    requests = [make_request(i, 2, 5) for i in range(4)]
    waiting = Responses.of(requests, num_groups=2, rows_per_group=rows).table
    with pytest.raises(ValueError, match=f"4 sequences do not fit the {rows} free rows"):
        waiting.enter(np.arange(4), np.ones(4, int))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda table: table.row.__setitem__(0, table.row[1]), "share a row"),
        (lambda table: table.row.__setitem__(0, NO_ROW), "those with a row"),
        (lambda table: table.length.__setitem__(0, 8), None),
    ],
    ids=["shared", "lost", "longer"],
)
def test_what_contradicts_itself_is_found(spoil, message):
    table = make_table(5, num_groups=2, rows=3)
    table.check_integrity()
    assert table.live.tolist() == [0, 1, 2, 3, 4]
    spoil(table)
    with pytest.raises(AssertionError, match=message):
        table.check_integrity()


@dataclass(frozen=True)
class Case:
    tokens: list[int]
    ignore_eos: bool
    is_truncated: bool


@pytest.mark.parametrize(
    "case",
    [
        Case([5, 0], False, is_truncated=False),
        Case([5, 6], False, is_truncated=True),
        Case([0, 6], False, is_truncated=True),
        Case([5, 0], True, is_truncated=True),
    ],
    ids=str,
)
def test_a_completion_says_how_it_ended(case):
    request = Request((1,), np.zeros(2, np.uint32), 2, ignore_eos=case.ignore_eos)
    responses = dealt([request], num_groups=1, rows=1)
    table = responses.table
    tokens = np.array([case.tokens], np.int32)
    logprobs, goes_on = np.zeros((1, 2), np.float32), np.array([False])
    retire(responses, burst_output(tokens, logprobs, np.array([2]), goes_on))
    (done,) = responses.completions(eos_ids=(0,))
    assert done.is_truncated == case.is_truncated
    assert not table.has_work and table.load().live == 0


@pytest.mark.parametrize("is_recomputed", [True, False])
def test_the_longest_sequences_go_to_different_groups(is_recomputed):
    requests = [make_request(i, prompt_length=1 + i, max_new_tokens=5) for i in range(4)]
    table = dealt(requests, num_groups=1, rows=4).table
    group = table.regroup(2, np.full(4, is_recomputed))
    assert group.tolist() == [1, 0, 1, 0]  # longest first: 3, 2, 1, 0 in turns


def test_what_is_recomputed_fills_the_emptier_groups():
    """Groups of 4, 0, 0, 0 merge by twos; two of the four may go elsewhere."""
    table = make_table(4, num_groups=1, rows=4)
    table.seat(np.zeros(4, int), num_groups=4, rows_per_group=4)
    group = table.regroup(2, np.array([False, True, True, False]))
    assert group.tolist() == [0, 1, 1, 0]
