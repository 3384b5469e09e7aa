"""Responses of earlier iterations: what is kept of them, and where rows find it."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.responses import Request, Responses
from pat_jax.engine.sequences.sequence_table import NO_TOKEN
from pat_jax.engine.sequences.texts import LEAD, Texts, texts

tokens = st.lists(st.integers(0, 3), max_size=5)
asked = tokens.map(tuple)
puts = st.lists(st.tuples(asked, st.lists(tokens, max_size=4)), max_size=20)
bounds = st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 2))


def filled(many, bounds) -> EarlierResponses:
    store = EarlierResponses(*bounds)
    for prompt, generated in many:
        store.put(prompt, [np.array(x, np.int64) for x in generated])
    return store


def content(store: EarlierResponses) -> list[tuple[list[int], list[list[int]]]]:
    return [(prompt.tolist(), [x.tolist() for x in found]) for prompt, found in store]


@given(puts, bounds)
def test_no_bound_is_ever_passed(many, bounds):
    most, of_prompt, beside = bounds
    store = EarlierResponses(*bounds)
    for prompt, generated in many:
        store.put(prompt, [np.array(x, np.int32) for x in generated])
        held = [(len(asked), list(map(len, found))) for asked, found in store]
        assert store.num_tokens == sum(asked + sum(found) for asked, found in held) <= most
        assert all(sum(found) + beside * len(found) <= of_prompt for _, found in held)
        assert store.num_responses == sum(len(found) for _, found in held)
        assert all(found for _, found in held) and len(store) == len(held)


@given(puts.filter(len), bounds)
def test_what_was_said_last_is_kept_first(many, bounds):
    """As far as it finds room; behind it what was said before, the newest first."""
    most, of_prompt, beside = bounds
    store, ever = filled(many, bounds), {}
    for prompt, generated in many:
        newest = [*generated, *ever.get(prompt, [])]
        ever[prompt] = [x for i, x in enumerate(newest) if x and x not in newest[:i]]
    for prompt, generated in ever.items():
        found = [x.tolist() for x in store.of(prompt)]
        assert found == generated[: len(found)]
    prompt, generated = many[-1]
    fresh = [x for i, x in enumerate(generated) if x and x not in generated[:i]]
    room = np.cumsum([len(x) + beside for x in fresh]) <= of_prompt
    found = [x.tolist() for x in store.of(prompt)]
    assert found[: room.sum()] == fresh[: room.sum()] or len(prompt) + of_prompt > most


@given(puts, bounds)
def test_prompts_go_by_when_they_were_met_last(many, bounds):
    store, unbounded = filled(many, bounds), filled(many, (10**6, *bounds[1:]))
    prompts = [asked for asked, _ in content(unbounded)]
    assert [asked for asked, _ in content(store)] == prompts[len(prompts) - len(store) :]
    last = {prompt: i for i, (prompt, _) in enumerate(many)}
    assert all(last[tuple(a)] < last[tuple(b)] for (a, _), (b, _) in pairwise(content(store)))


@given(puts, bounds)
def test_putting_all_of_it_in_another_makes_the_same(many, bounds):
    store, other = filled(many, bounds), EarlierResponses(*bounds)
    for prompt, found in store:
        other.put(prompt, found)
    assert content(other) == content(store)
    assert (other.checksum, other.num_tokens) == (store.checksum, store.num_tokens)


@given(puts, puts, bounds)
def test_a_checksum_tells_contents_apart(many, others, bounds):
    one, other = filled(many, bounds), filled(others, bounds)
    assert (one.checksum == other.checksum) == (content(one) == content(other))


PROMPT = tuple(range(100, 120))


def begun(generated: Sequence[Sequence[int]], done: Sequence[int] = ()) -> Responses:
    """Samples of `PROMPT` that have said so much; those of `done` have ended."""
    requests = [Request(PROMPT, sequence_key(0, i), 40) for i in range(len(generated))]
    found = Responses.of(requests, num_replicas=1, rows_per_replica=len(generated))
    table = found.table
    for i, x in enumerate(generated):
        table.length[i] = len(PROMPT) + len(x)
        found.tokens[i, len(PROMPT) : table.length[i]] = x
        table.row[i] = i
    table.end_now(np.array(done, int))
    return found


def others(laid_out: Texts, row: int, room: int) -> list[list[int]]:
    """Texts from the last column backwards, whole ones without the end of the prompt before them."""
    found: list[list[int]] = [[]]
    for token in laid_out.columns[row, :room].tolist():
        found = [*found, []] if token == NO_TOKEN else [*found[:-1], [*found[-1], token]]
    lead = list(PROMPT[-LEAD:])
    return [x[LEAD:] if x[:LEAD] == lead else x for x in reversed(found) if x]


def kept(*generated: Sequence[int]) -> EarlierResponses:
    return filled([(PROMPT, generated)], (1000, 1000, 0))


def test_a_prompt_with_one_sample_drafts_from_earlier_responses():
    alone = begun([[1, 2]])
    assert others(texts(alone, 128, 64), 0, 128) == []
    assert others(texts(alone, 128, 64, kept([3, 4], [5])), 0, 128) == [[3, 4], [5]]
    assert others(texts(alone, 128, 64, EarlierResponses(9, 9)), 0, 128) == []


def test_samples_that_have_ended_come_before_earlier_responses_and_these_before_others():
    some = begun([[1], [2, 2], [3, 3, 3], [4, 4, 4, 4]], done=[1, 2])
    found = texts(some, 256, 64, kept([5, 6], [7, 7, 7]))
    expected = [[3, 3, 3], [2, 2], [5, 6], [7, 7, 7], [4, 4, 4, 4], [1]]
    assert others(found, 0, 256) == others(found, 3, 256) == expected
    first, stop = found.borders[0].tolist()
    of_earlier = found.columns[0, first:stop].tolist()
    assert of_earlier == [*PROMPT[-LEAD:], 7, 7, 7, NO_TOKEN, *PROMPT[-LEAD:], 5, 6, NO_TOKEN]


def test_where_room_is_short_texts_are_cut_behind_what_rows_are_at():
    long = [list(range(i, i + 30)) for i in (200, 300, 400)]
    some = begun([[1, 2, 3]])
    found, most = others(texts(some, 82, 64, kept(*long)), 0, 82), 3 + 64 // 4
    # Of the third there is room for nine tokens, the last ones.
    assert found == [long[0][:most], long[1][:most], long[2][most - 9 : most]]
    assert others(texts(some, 200, 64, kept(*long)), 0, 200) == long
