"""Drafts copied from texts, and which of their tokens are verified, against plain Python."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.device.ngram import CONTEXT, Draft, find
from pat_jax.engine.device.token_batch import Counts, left_by, lengths, met_by
from pat_jax.engine.sequences.sequence_table import NO_TOKEN
from pat_jax.engine.sequences.state import Runs
from pat_jax.planning.draft_counts import BRANCHES, DRAFTS, KINDS, MATCH_BIN_EDGES, MAX_RUN

few_tokens = st.integers(0, 2)  # so that much repeats
found_in = jax.jit(find, static_argnames="most")
given_to = jax.jit(lengths, static_argnames="room")
texts = st.lists(st.one_of(few_tokens, few_tokens, few_tokens, st.just(NO_TOKEN)), max_size=40)


def longest_match(
    text: list[int], newest: int, most: int, but: int = NO_TOKEN
) -> tuple[list[int], int]:
    """What `ngram.find` finds of one row.

    Args:
      but: a token that nothing may begin with.
    """
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
        if text[place + 1] not in (NO_TOKEN, but) and run and run >= best:
            best, at = run, place
    if not best:
        return [NO_TOKEN] * most, 0
    generated = text[at + 1 : at + 1 + most]
    generated = generated[: generated.index(NO_TOKEN)] if NO_TOKEN in generated else generated
    return generated + [NO_TOKEN] * (most - len(generated)), best


@given(
    st.lists(
        st.tuples(texts, st.lists(few_tokens, min_size=1, max_size=30)), min_size=4, max_size=4
    )
)
def test_a_draft_is_what_followed_the_longest_match(rows):
    """Of equally long ones the last; across what is no token nothing is matched or copied. A branch is what
    followed the longest behind which another token came."""
    most, columns = 5, 80
    text = np.full((len(rows), columns), NO_TOKEN, np.int32)
    newest = np.zeros(len(rows), np.int32)
    for row, (others, own) in enumerate(rows):
        generated = [*others, NO_TOKEN, *own]
        text[row, : len(generated)], newest[row] = generated, len(generated) - 1
    draft, branch = found_in(jnp.asarray(text), jnp.asarray(newest), most=most)
    for row, at in enumerate(newest.tolist()):
        tokens, matched = longest_match(text[row].tolist(), at, most)
        other = longest_match(text[row].tolist(), at, most, but=tokens[0])
        for found, expected in ((draft, (tokens, matched)), (branch, other)):
            assert np.asarray(found.tokens)[row].tolist() == expected[0]
            assert int(found.matched[row]) == expected[1]


class Drawn(NamedTuple):
    draft: Draft
    branch: Draft
    runs: Runs
    running: np.ndarray
    accept_prob: np.ndarray
    room: int

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        draft, branch = (Draft(*map(jnp.asarray, x)) for x in (self.draft, self.branch))
        runs, running = Runs(*map(jnp.asarray, self.runs)), jnp.asarray(self.running)
        found = given_to(
            draft, branch, runs, running, jnp.asarray(self.accept_prob), room=self.room
        )
        return np.asarray(found[0]), np.asarray(found[1])

    def worth(self, row: int) -> tuple[list[float], list[float]]:
        """How likely each token of its draft and of its branch is right."""
        kind, place = self.runs.kind[row], self.runs.place[row]
        run = self.accept_prob[0, kind, place:] / max(self.accept_prob[0, kind, place], 1e-30)
        own = self.accept_prob[1, sum(int(self.branch.matched[row]) >= n for n in MATCH_BIN_EDGES)]
        many, few = (int((x.tokens[row] >= 0).sum()) for x in (self.draft, self.branch))
        return run[1 : 1 + many].tolist(), ((1 - run[1]) * own[1 : 1 + few]).tolist()


@st.composite
def drafts(draw):
    # Few shapes, for each compiles; rows that are not running are as if they were not there.
    rows, most = draw(st.sampled_from([(1, 3), (4, 1), (5, 6)]))

    def each(low: int, high: int) -> Any:
        return np.array(
            draw(st.lists(st.integers(low, high), min_size=rows, max_size=rows)), np.int32
        )

    seed = draw(st.integers(0, 2**32 - 1))
    accept_prob = np.cumprod(
        np.random.default_rng(seed).uniform(0.3, 1, (2, KINDS, 1 + MAX_RUN)), axis=2
    )
    accept_prob[:, :, 0], accept_prob[:, 0, 1:] = 1, 0

    def one(token: int) -> Draft:
        tokens: Any = np.where(np.arange(most)[None] < each(0, most)[:, None], token, NO_TOKEN)
        return Draft(tokens.astype(np.int32), each(0, CONTEXT), each(0, 0))

    runs = Runs(each(0, KINDS - 1), each(0, MAX_RUN - most), each(0, CONTEXT))
    room = rows + draw(st.sampled_from([0, 2, 3 * rows]))
    return Drawn(one(1), one(2), runs, each(0, 1) > 0, accept_prob, room)


@given(drafts())
def test_the_room_goes_to_what_is_likeliest_right(drawn):
    """As much is expected to be right as in the best of all ways to give the room away."""
    found, most = drawn.lengths, drawn.draft.tokens.shape[1]
    left, mine, values = drawn.room - int(drawn.running.sum()), 0.0, []
    for row in range(len(drawn.running)):
        both, lengths = drawn.worth(row), [int(x[row]) for x in found]
        assert sum(lengths) <= most and (drawn.running[row] or not sum(lengths))
        for worth, length in zip(both, lengths, strict=True):
            assert length <= len(worth)
            mine += sum(worth[:length])
        if drawn.running[row]:
            likeliest = sorted((x for worth in both for x in worth), reverse=True)
            values += [x for x in likeliest[:most] if x > 0]
    assert sum(x.sum() for x in found) == min(left, len(values))
    np.testing.assert_allclose(mine, sum(sorted(values, reverse=True)[:left]), rtol=1e-4)


def test_a_run_goes_on_while_its_match_grows():
    """A text of 30 tokens is copied by drafts of 3, until a token is another; then runs begin anew."""
    copied, longest = list(range(5, 35)), 3
    generated = [*copied[:2], *copied[2:20], 99, 98, 97]
    text = np.full((1, 80), NO_TOKEN, np.int32)
    text[0, :30] = copied
    left, counts, at = Runs.none(1), Counts.none(), 1  # two tokens are said: at is the newest one
    running = jnp.array([True])
    while at < 19:
        text[0, 40 : 41 + at] = generated[: at + 1]
        draft, _ = find(jnp.asarray(text), jnp.array([40 + at]), most=longest)
        ahead = [int(t) for t in draft.tokens[0]]
        accepted = next((i for i, t in enumerate(ahead) if t != generated[at + 1 + i]), longest)
        length = jnp.array([longest])
        counts = counts.with_step(left, draft, length, jnp.array([accepted]), running)
        left = left_by(met_by(draft, left), length, jnp.array([accepted]), ~running)
        at += accepted + 1
    # It began with two tokens matched; tokens 0 … 17 of it were right, and token 18 was not.
    begun, proposed, accepted = (np.asarray(x)[0] for x in counts[:3])
    proposed, accepted = proposed[DRAFTS], accepted[DRAFTS]
    kind = sum(edge <= 2 for edge in MATCH_BIN_EDGES)
    assert begun.tolist() == [int(k == kind) for k in range(KINDS)]
    assert proposed[kind].tolist() == [1] * 19 + [0] * (MAX_RUN - 19)
    assert accepted[kind].tolist() == [1] * 18 + [0] * (MAX_RUN - 18)
    assert int(counts.verified[0]) == 15 and int(left.matched[0]) == 0


def test_branches_are_counted_where_the_draft_beside_them_is_wrong():
    """A first token whether it was verified or not: what was drawn tells. A branch that is right ends the run."""
    nothing = [NO_TOKEN] * 3

    def one(tokens: list[list[int]], matched: list[int]) -> Draft:
        return Draft(jnp.array(tokens), jnp.array(matched), jnp.zeros(len(matched), jnp.int32))

    # The draft is right; it is not and two of the branch's three are; the branch was not verified and would have
    # been right; nothing matched.
    draft = one([[5, 6, 7]] * 3 + [nothing], [2, 2, 2, 0])
    branch = one([[8, 9, 4]] * 3 + [nothing], [1, 1, 1, 0])
    length, accepted, drawn = (jnp.array(x) for x in ([2, 3, 0, 0], [0, 2, 0, 0], [5, 8, 8, 5]))
    running, runs = jnp.ones(4, bool), met_by(draft, Runs(*jnp.zeros((3, 4), jnp.int32)))
    counts = Counts.none().with_branches(runs.kind, draft, branch, length, accepted, drawn, running)
    of_two, of_one = (sum(edge <= n for edge in MATCH_BIN_EDGES) for n in (2, 1))
    branch_counts, proposed, good = (
        np.asarray(x)[0] for x in (counts.branch_counts, counts.proposed, counts.accepted)
    )
    assert branch_counts[of_two, of_one] == branch_counts.sum() == 3
    assert proposed[BRANCHES, of_one].tolist() == [2, 1, 1] + [0] * (MAX_RUN - 3)
    assert good[BRANCHES, of_one].tolist() == [2, 1, 0] + [0] * (MAX_RUN - 3)
    assert proposed.sum() == 4 and int(counts.verified[0]) == 5
    left = left_by(runs, jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32), accepted > 0)
    assert (np.asarray(left.matched) > 0).tolist() == [True, False, True, False]
