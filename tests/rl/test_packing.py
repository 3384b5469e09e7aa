"""Each example lies whole in a row, none over another, and little is left empty."""

import math
from itertools import count, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.rl.batches.batches import to_supervised_batch, to_train_batch
from pat_jax.rl.batches.packing import (
    PASS_COST,
    Prefix,
    fills,
    pack_rows,
    shapes,
    single_passes,
)
from pat_jax.rl.batches.train_batch import NOT_RECORDED
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup

BUCKETS = (4, 8, 16)
LENGTHS = st.lists(st.integers(1, 16), max_size=60)


def test_shapes_halve_the_rows_and_then_the_length():
    assert shapes((64, 128, 200), budget=2000, row_multiple=4) == [(4, 128), (4, 200), (8, 200)]
    # 4096 is too near to 5120 to be worth a program, and the fifth shape too small.
    long = shapes((64, 128, 256, 512, 1024, 2048, 4096, 5120), budget=5120, row_multiple=1)
    assert long == [(1, 512), (1, 1024), (1, 2048), (1, 5120)]
    assert shapes((64, 128), budget=1024, row_multiple=1) == [(4, 128), (8, 128)]
    assert shapes((64, 128), budget=1, row_multiple=4) == [(4, 64), (4, 128)]


def test_shapes_are_no_more_than_asked_for_nor_rows_than_examples():
    assert shapes((64, 128, 256), 1024, 1, most_shapes=2) == [(2, 256), (4, 256)]
    assert shapes((64, 128, 160), 8192, 2, most_rows=16) == [(4, 160), (8, 160), (16, 160)]
    assert shapes((64, 128), 8192, 4, most_rows=6) == [(4, 128), (8, 128)]  # two on each shard
    assert shapes((64, 128), 1024, 1, most_rows=100) == shapes((64, 128), 1024, 1)


@given(st.integers(1, 200), st.integers(1, 8))
def test_shapes_are_no_more_than_buckets_and_share_the_rows_out_evenly(budget, row_multiple):
    found = shapes(BUCKETS, budget, row_multiple)
    assert len(found) == len(set(found)) <= len(BUCKETS)
    assert found == sorted(found, key=math.prod)
    assert all(rows % row_multiple == 0 and length in BUCKETS for rows, length in found)
    assert found[-1][1] == BUCKETS[-1]
    assert math.prod(found[-1]) <= max(budget, row_multiple * BUCKETS[-1])


@given(LENGTHS, st.integers(1, 100), st.sampled_from([1, 2, 4]))
def test_no_more_than_half_of_the_full_micro_batches_is_empty(lengths, budget, row_multiple):
    """First fit leaves two rows half empty nowhere; what is left over takes one more at most."""
    allowed = shapes(BUCKETS, budget, row_multiple)
    slots = sum(map(math.prod, pack_rows(lengths, allowed).shapes))
    assert slots <= 2 * sum(lengths) + 2 * math.prod(allowed[-1])


GROUPS = st.lists(
    st.tuples(st.integers(0, 7), st.lists(st.integers(1, 8), min_size=1, max_size=6)), max_size=12
)


@given(GROUPS, st.integers(1, 100), st.sampled_from([1, 2, 4]), st.randoms(use_true_random=False))
def test_every_token_lies_in_its_row_once_and_a_shared_prefix_before_it(
    groups, budget, row_multiple, random
):
    """By the positions that are written: each token finds those before it at theirs."""
    allowed = shapes(BUCKETS, budget, row_multiple)
    examples = [(Prefix(g, n), n + own) for g, (n, owns) in enumerate(groups) for own in owns]
    random.shuffle(examples)
    prefixes, lengths = [one for one, _ in examples], [length for _, length in examples]
    packing = pack_rows(lengths, allowed, prefixes)
    assert set(packing.shapes) <= set(allowed)
    rows: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}  # slot -> example, token
    for i, (length, spot) in enumerate(zip(lengths, packing.spots, strict=True)):
        assert spot.row < packing.shapes[spot.micro][0]
        assert spot.shared in (0, prefixes[i].length)
        row = rows.setdefault(spot[:2], {})
        for token in range(spot.shared, length):
            slot = spot.start + token - spot.shared
            assert slot not in row and slot < packing.shapes[spot.micro][1]
            row[slot] = i, token
    for i, spot in enumerate(packing.spots):
        row = rows[spot[:2]]
        if spot.shared:  # then the nearest position of 0 before it begins one with its prefix
            begin = max(slot for slot, (_, token) in row.items() if not token and slot < spot.start)
            first = row[begin][0]
            assert prefixes[first].of == prefixes[i].of
            assert [row[begin + t] for t in range(spot.shared)] == [
                (first, t) for t in range(spot.shared)
            ]
    assert {spot.micro for spot in packing.spots} == set(range(len(packing.shapes)))
    for key, row in rows.items():
        assert sorted(row) == list(range(len(row)))
        numbers = sorted((s.start, s.number) for s in packing.spots if s[:2] == key)
        assert [number for _, number in numbers] == list(range(1, len(numbers) + 1))


@given(GROUPS, st.integers(1, 100), st.sampled_from([1, 2, 4]))
def test_sharing_takes_no_more_tokens(groups, budget, row_multiple):
    allowed = shapes(BUCKETS, budget, row_multiple)
    prefixes = [Prefix(g, n) for g, (n, owns) in enumerate(groups) for _ in owns]
    lengths = [n + own for n, owns in groups for own in owns]
    apart, shared = pack_rows(lengths, allowed), pack_rows(lengths, allowed, prefixes)
    each = PASS_COST * math.prod(allowed[-1])
    costs = [sum(math.prod(s) + each for s in packing.shapes) for packing in (apart, shared)]
    assert costs[1] <= costs[0] + 1e-9
    assert costs[1] < costs[0] - 1e-9 or shared == apart


def test_what_is_left_over_goes_into_smaller_shapes():
    allowed = shapes((4, 8, 16), budget=64, row_multiple=1)
    assert allowed == [(1, 16), (2, 16), (4, 16)]
    assert pack_rows([8] * 8, allowed).shapes == [(4, 16)]
    assert pack_rows([8] * 10, allowed).shapes == [(4, 16), (1, 16)]
    assert pack_rows([8] * 14, allowed).shapes == [(4, 16), (2, 16), (1, 16)]
    assert pack_rows([16, 9, 7, 3, 2], allowed).shapes == [(2, 16), (1, 16)]


def test_examples_fill_micro_batches_whose_padding_is_little():
    micro_shapes = [(1, 64), (1, 128), (2, 128)]
    assert not fills([51], micro_shapes) and fills([52], micro_shapes)  # 80 % of 64
    assert not fills([52, 13], micro_shapes)  # a row of 128
    assert fills([52, 13, 40], micro_shapes)
    assert not fills([40, 40], micro_shapes)


@given(st.integers(1, 128), st.integers(1, 4), st.integers(2, 5))
def test_examples_of_any_one_length_fill_micro_batches_at_last(length, rows, halvings):
    """Also of 60 % of a row, which never have little padding."""
    micro_shapes = shapes([32, 64, 128], 128 * rows * 2**halvings, rows)
    largest = math.prod(micro_shapes[-1])
    most = largest // length + 1  # one more than the largest shape can have room for
    assert any(fills([length] * n, micro_shapes) for n in range(1, most + 1))


def test_an_example_longer_than_every_row_is_refused():
    with pytest.raises(ValueError, match=r"an example of 17 tokens does not fit .* 16"):
        pack_rows([3, 17], shapes(BUCKETS, 32, 1))


@given(LENGTHS, st.integers(1, 20))
def test_single_passes_keep_the_order_and_fill_one_micro_batch_each(lengths, most):
    batches = single_passes(lengths, (2, 16), max_examples=most)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch == sorted(batch) and 0 < len(batch) <= most
        assert sum(lengths[i] for i in batch) <= 2 * 16
    for one, later in pairwise(batches):
        assert len(one) == most or sum(lengths[i] for i in one) + lengths[later[0]] > 16


LAYERS, K = 2, 3
SHAPES = shapes((12, 24, 48), budget=2 * 48, row_multiple=1)
# Of each group the tokens of its prompt and of each response, and whether their routes are recorded.
ROUTED = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 9, 20]),
        st.lists(st.integers(1, 12), min_size=3, max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


def routes_of(tokens: np.ndarray) -> np.ndarray:
    """Made up from each token, which occurs nowhere else; int16[tokens, layers, k]."""
    every = LAYERS * K * np.asarray(tokens)[:, None] + np.arange(LAYERS * K)
    return every.reshape(-1, LAYERS, K).astype(np.int16)


@given(ROUTED, st.booleans(), st.integers(1, 4))
def test_routes_lie_where_their_tokens_lie(lengths, shares_prompts: bool, mini_batch_size: int):
    token, groups = count(1), list[RolloutGroup]()
    without: set[int] = set()  # tokens of no recorded experts
    for number, (prompt_length, responses, is_known) in enumerate(lengths):
        prompt = Prompt(number, tuple(next(token) for _ in range(prompt_length)), "", {})
        rollouts = []
        for sample, length in enumerate(responses):
            tokens = np.array([next(token) for _ in range(length)], np.int32)
            whole = np.concatenate([prompt.tokens, tokens])
            routes = routes_of(whole[:-1]) if is_known else None
            without |= set(tokens.tolist()) if routes is None else {int(tokens[-1])}
            logprobs = np.zeros(length, np.float32)
            done = FinishReason.STOP
            rollouts.append(Rollout(prompt, sample, tokens, logprobs, done, None, routes))
        without |= set() if is_known else set(prompt.tokens)
        groups.append(RolloutGroup(prompt, rollouts))
    batch = to_train_batch(
        groups,
        np.ones((len(groups), 3), np.float32),
        mini_batch_size=mini_batch_size,
        micro_shapes=SHAPES,
        aggregation="token",
        truncated="score",
        shares_prompts=shares_prompts,
    )
    found: set[int] = set()
    for i, mini in enumerate(batch.mini_batches):
        of_mini = groups[i * mini_batch_size : (i + 1) * mini_batch_size]
        is_known = any(x.routed_experts is not None for g in of_mini for x in g.rollouts)
        for micro in mini:
            assert (micro.routes is not None) == is_known
            if micro.routes is None:
                continue
            assert micro.routes.dtype == np.int16
            assert micro.routes.shape == (*micro.tokens.shape, LAYERS, K)
            is_none = (micro.tokens == 0) | np.isin(micro.tokens, list(without))
            assert (micro.routes[is_none] == NOT_RECORDED).all()
            tokens = micro.tokens[~is_none]
            np.testing.assert_array_equal(micro.routes[~is_none], routes_of(tokens))
            found |= set(tokens.tolist())
    if all(is_known for *_, is_known in lengths):
        assert found == set(range(1, next(token))) - without
    has_shared = any(len(group.prompt.tokens) > 1 for group in groups)
    assert batch.shared.any() <= (shares_prompts and has_shared)


def test_demonstrations_have_no_routes():
    shown = to_supervised_batch([([1, 2], [3, 4, 5])], micro_shapes=[(1, 8)])
    assert all(micro.routes is None for micro in shown)
