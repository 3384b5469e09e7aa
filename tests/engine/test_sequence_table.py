"""The table of sequences, by cases with a known answer; `test_serving.py` has it at length."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from bursts import burst_output, retire

from pat_jax.engine.sequences.responses import Request, Responses
from pat_jax.engine.sequences.sequence_table import NO_ROW, SequenceTable


def make_request(number: int, prompt_length: int, max_new_tokens: int) -> Request:
    key = np.array([number, 7], np.uint32)
    return Request((number,) * prompt_length, key, max_new_tokens, prompt_id=90 - number // 2)


def dealt(requests: list[Request], num_replicas: int, rows: int) -> Responses:
    """Of sequences that are running, as many of them as there are rows; neighbours share a
    replica."""
    responses = Responses.of(requests, num_replicas=num_replicas, rows_per_replica=rows)
    each = min(rows, -(-len(requests) // num_replicas))
    replica = np.repeat(np.arange(num_replicas), each)[: len(requests)]
    responses.table.add(np.arange(len(replica)), replica)
    return responses


def make_table(count: int, num_replicas: int, rows: int) -> SequenceTable:
    return dealt([make_request(i, 2, 5) for i in range(count)], num_replicas, rows).table


def test_a_request_of_no_known_prompt_leaves_all_strangers():
    requests = [make_request(0, 2, 5), replace(make_request(1, 2, 5), prompt_id=None)]
    for some, is_known in ((requests[:1], True), (requests, False), ([], True)):
        table = Responses.of(some, num_replicas=1, rows_per_replica=2).table
        assert (table.load().prompt is not None) == is_known


def test_those_that_enter_get_the_rows_of_the_ended():
    responses = dealt([make_request(i, 2, 5) for i in range(9)], num_replicas=2, rows=3)
    table = responses.table
    assert table.running.tolist() == [0, 1, 2, 3, 4, 5] and table.load().waiting == 3
    ended = np.array([0, 1, 5])
    rows = table.row[ended]
    tokens, running = np.zeros((6, 1), np.int32), ~np.isin(np.arange(6), rows)
    retire(responses, burst_output(tokens, tokens.astype(np.float32), np.ones(6, int), running))
    assert table.waiting.tolist() == [6, 7, 8] and table.load().step == 1
    table.add(np.array([6, 7, 8]), np.array([0, 0, 1]))
    assert sorted(table.row[[6, 7, 8]]) == sorted(rows)
    assert len(table.waiting) == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_too_many_sequences_are_refused(rows):
    table = make_table(9, num_replicas=4, rows=3)
    with pytest.raises(ValueError, match=f"3 sequences do not fit a replica of {rows} rows"):
        table.assign_rows(np.arange(9) % 4, num_replicas=4, rows_per_replica=rows)
    requests = [make_request(i, 2, 5) for i in range(4)]
    waiting = Responses.of(requests, num_replicas=2, rows_per_replica=rows).table
    with pytest.raises(ValueError, match=f"4 sequences do not fit the {rows} free rows"):
        waiting.add(np.arange(4), np.ones(4, int))


@pytest.mark.parametrize(
    "poison, message",
    [
        (lambda table: table.row.__setitem__(0, table.row[1]), "share a row"),
        (lambda table: table.row.__setitem__(0, NO_ROW), "those with a row"),
        (lambda table: table.length.__setitem__(0, 8), None),
    ],
    ids=["shared", "lost", "longer"],
)
def test_what_contradicts_itself_is_found(poison, message):
    table = make_table(5, num_replicas=2, rows=3)
    table.check_integrity()
    assert table.running.tolist() == [0, 1, 2, 3, 4]
    poison(table)
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
    responses = dealt([request], num_replicas=1, rows=1)
    table = responses.table
    tokens = np.array([case.tokens], np.int32)
    logprobs, goes_on = np.zeros((1, 2), np.float32), np.array([False])
    retire(responses, burst_output(tokens, logprobs, np.array([2]), goes_on))
    done = responses.completion(0, eos_ids=(0,))
    assert done.is_truncated == case.is_truncated
    assert not table.has_work and table.load().running == 0


@pytest.mark.parametrize("is_recomputed", [True, False])
def test_the_longest_sequences_go_to_different_groups(is_recomputed):
    requests = [make_request(i, prompt_length=1 + i, max_new_tokens=5) for i in range(4)]
    table = dealt(requests, num_replicas=1, rows=4).table
    replica = table.regroup(2, np.full(4, is_recomputed))
    assert replica.tolist() == [1, 0, 1, 0]  # longest first: 3, 2, 1, 0 in turns


def test_what_is_recomputed_fills_the_emptier_groups():
    """Replicas of 4, 0, 0, 0 merge by twos; two of the four may go elsewhere."""
    table = make_table(4, num_replicas=1, rows=4)
    table.assign_rows(np.zeros(4, int), num_replicas=4, rows_per_replica=4)
    replica = table.regroup(2, np.array([False, True, True, False]))
    assert replica.tolist() == [0, 1, 1, 0]
