"""Drafts copied from texts, and which of their tokens are verified, against plain Python."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.device.lines import Counts, left_by, lengths, line_of, met_by
from pat_jax.engine.device.suffix import CONTEXT, Draft, append, find, put_windows
from pat_jax.engine.sequences.state import Runs
from pat_jax.engine.sequences.types import NO_TOKEN
from pat_jax.planning.drafts import KINDS, MATCHES, MOST

few_tokens = st.integers(0, 2)  # so that much repeats
texts = st.lists(st.one_of(few_tokens, few_tokens, few_tokens, st.just(NO_TOKEN)), max_size=40)


def longest_match(text: list[int], newest: int, most: int) -> tuple[list[int], int]:
    """What `suffix.find` says of one row."""
    best, at = 0, -1
    for place in range(len(text) - 1):
        run = 0
        while (
            run < CONTEXT
            and place - run >= 0
            and newest - run >= 0
            and text[place - run] == text[newest - run] >= 0
        ):
            run += 1
        if (text[place + 1] >= 0 and run >= best > 0) or (text[place + 1] >= 0 and run > best):
            best, at = run, place
    if not best:
        return [NO_TOKEN] * most, 0
    said = text[at + 1 : at + 1 + most]
    said = said[: said.index(NO_TOKEN)] if NO_TOKEN in said else said
    return said + [NO_TOKEN] * (most - len(said)), best


@given(
    st.lists(
        st.tuples(texts, st.lists(few_tokens, min_size=1, max_size=30)), min_size=1, max_size=4
    )
)
def test_a_draft_is_what_followed_the_longest_match(rows):
    """Of equally long ones the last; across what is no token nothing is matched or copied."""
    most, columns = 5, 80
    text = np.full((len(rows), columns), NO_TOKEN, np.int32)
    newest = np.zeros(len(rows), np.int32)
    for row, (others, own) in enumerate(rows):
        said = [*others, NO_TOKEN, *own]
        text[row, : len(said)], newest[row] = said, len(said) - 1
    found = find(jnp.asarray(text), jnp.asarray(newest), most=most)
    for row, at in enumerate(newest.tolist()):
        tokens, matched = longest_match(text[row].tolist(), at, most)
        assert int(found.matched[row]) == matched
        assert np.asarray(found.tokens)[row].tolist() == tokens


def test_a_text_that_repeats_drafts_itself():
    text = np.full((1, 20), NO_TOKEN, np.int32)
    text[0, :7] = [4, 5, 6, 7, 4, 5, 6]
    found = find(jnp.asarray(text), jnp.array([6]), most=4)
    assert np.asarray(found.tokens).tolist() == [[7, 4, 5, 6]]
    assert np.asarray(found.matched).tolist() == [3]


def test_what_is_said_is_appended_and_nothing_behind_it():
    text = jnp.full((2, 6), 9, jnp.int32)
    tokens, count = jnp.array([[1, 2, 3], [4, 5, 6]]), jnp.array([2, 0])
    found = append(text, tokens, count, jnp.array([1, 3]))
    assert found.tolist() == [[9, 1, 2, -1, 9, 9], [9, 9, 9, -1, -1, -1]]
    windows = put_windows(jnp.zeros((2, 4, 2)), jnp.ones((2, 2, 2)), jnp.array([0, 2]))
    assert windows[:, :, 0].tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


class Drawn(NamedTuple):
    draft: Draft
    runs: Runs
    live: np.ndarray
    reach: np.ndarray
    room: int

    @property
    def lengths(self) -> np.ndarray:
        draft, runs = Draft(*map(jnp.asarray, self.draft)), Runs(*map(jnp.asarray, self.runs))
        live, reach = jnp.asarray(self.live), jnp.asarray(self.reach)
        return np.asarray(lengths(draft, runs, live, reach, room=self.room))


@st.composite
def drafts(draw):
    rows, most = draw(st.integers(1, 5)), draw(st.integers(1, 6))

    def each(low: int, high: int) -> Any:
        return np.array(
            draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows)), np.int32
        )

    seed = draw(st.integers(0, 2**32 - 1))
    reach = np.cumprod(np.random.default_rng(seed).uniform(0.3, 1, (KINDS, 1 + MOST)), axis=1)
    reach[:, 0], reach[0, 1:] = 1, 0
    tokens: Any = np.where(np.arange(most)[None] < each(0, most)[:, None], 1, NO_TOKEN).astype(
        np.int32
    )
    runs = Runs(each(0, KINDS - 1), each(0, MOST - most), each(0, CONTEXT))
    room = rows + draw(st.integers(0, 3 * rows))
    return Drawn(Draft(tokens, each(0, CONTEXT), each(0, 0)), runs, each(0, 1) > 0, reach, room)


@given(drafts())
def test_the_room_goes_to_what_is_likeliest_right(drawn):
    """As much is expected to be right as in the best of all ways to give the room away."""
    draft, runs, live, reach, room = drawn
    given_to = drawn.lengths
    has = (draft.tokens >= 0).sum(axis=1)

    def worth(row: int, turn: int) -> float:
        kind, place = runs.kind[row], runs.place[row]
        return float(reach[kind, place + 1 + turn] / max(reach[kind, place], 1e-30))

    turns = [(row, turn) for row in np.flatnonzero(live).tolist() for turn in range(has[row])]
    values = [worth(*one) for one in turns if worth(*one) > 0]
    left = room - int(live.sum())
    assert (given_to <= has).all() and not given_to[~live].any()
    assert given_to.sum() == min(left, len(values))
    mine = sum(worth(row, turn) for row, turn in turns if turn < given_to[row])
    np.testing.assert_allclose(mine, sum(sorted(values, reverse=True)[:left]), rtol=1e-4)


@given(drafts())
def test_a_line_has_every_live_row_s_tokens_in_turn(drawn):
    draft, _, live, _, room = drawn
    count, turns = drawn.lengths, 1 + draft.tokens.shape[1]
    start = jnp.arange(len(live), dtype=jnp.int32) * 10
    line = line_of(jnp.asarray(count), jnp.asarray(live), start, room=room, turns=turns)
    expected = [
        (row, turn)
        for row in range(len(live))
        for turn in range(1 + int(count[row]) if live[row] else 0)
    ]
    taken = np.asarray(line.is_taken)
    pairs = zip(
        np.asarray(line.row)[taken].tolist(), np.asarray(line.turn)[taken].tolist(), strict=True
    )
    assert list(pairs) == expected and taken.sum() == len(expected) <= room
    for place, (row, turn) in enumerate(expected):
        assert int(line.place[row, turn]) == place
    assert np.asarray(line.positions)[:, 0].tolist() == np.asarray(start).tolist()


def test_a_run_goes_on_while_its_match_grows():
    """A text of 30 tokens is copied by drafts of 3, until a token is another; then runs begin anew."""
    copied, longest = list(range(5, 35)), 3
    said = [*copied[:2], *copied[2:20], 99, 98, 97]
    text = np.full((1, 80), NO_TOKEN, np.int32)
    text[0, :30] = copied
    left, counts, at = Runs.none(1), Counts.none(), 1  # two tokens are said: at is the newest one
    live = jnp.array([True])
    while at < 19:
        text[0, 40 : 41 + at] = said[: at + 1]
        draft = find(jnp.asarray(text), jnp.array([40 + at]), most=longest)
        ahead = [int(t) for t in draft.tokens[0]]
        right = next((i for i, t in enumerate(ahead) if t != said[at + 1 + i]), longest)
        length = jnp.array([longest])
        counts = counts.with_step(left, draft, length, jnp.array([right]), live)
        left = left_by(met_by(draft, left), length, jnp.array([right]))
        at += right + 1
    # It began with two tokens matched; tokens 0 … 17 of it were right, and token 18 was not.
    begun, tried, right = (np.asarray(x)[0] for x in counts[:3])
    kind = sum(edge <= 2 for edge in MATCHES)
    assert begun.tolist() == [int(k == kind) for k in range(KINDS)]
    assert tried[kind].tolist() == [1] * 19 + [0] * (MOST - 19)
    assert right[kind].tolist() == [1] * 18 + [0] * (MOST - 18)
    assert int(counts.verified[0]) == 15 and int(left.matched[0]) == 0
