"""The table of sequences, by cases with a known answer; `test_serving.py` has it at length."""

from dataclasses import replace

import numpy as np
import pytest
from bursts import burst_output, retire

from pat_jax.engine.sequences.responses import Request, Responses
from pat_jax.engine.sequences.sequence_table import SequenceTable


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


@pytest.mark.parametrize(
    ("said", "ignore_eos", "is_truncated"),
    [([5, 0], False, False), ([5, 6], False, True), ([0, 6], False, True), ([5, 0], True, True)],
)
def test_a_completion_says_how_it_ended(said, ignore_eos, is_truncated):
    request = Request((1,), np.zeros(2, np.uint32), 2, ignore_eos=ignore_eos)
    responses = dealt([request], num_replicas=1, rows=1)
    table = responses.table
    tokens = np.array([said], np.int32)
    logprobs, goes_on = np.zeros((1, 2), np.float32), np.array([False])
    retire(responses, burst_output(tokens, logprobs, np.array([2]), goes_on))
    done = responses.completion(0, eos_ids=(0,))
    assert done.is_truncated == is_truncated
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
