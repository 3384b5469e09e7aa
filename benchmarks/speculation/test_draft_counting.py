"""Counting drafts against a search through every place of every text, on made-up texts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.speculation import draft_counting
from benchmarks.speculation.draft_counting import Group, Record, Rules, Steps, verify
from pat_jax.engine.device.ngram import CONTEXT as ENGINE_CONTEXT
from pat_jax.engine.device.ngram import find
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.texts import texts as engine_texts

DRAFT, CONTEXT, BURST = 3, 4, 2
ROOM = 128  # columns for others: more than they fill
FIND = jax.jit(find, static_argnames="most")
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
branches = st.sampled_from([0, 2])  # most tokens of one
texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=3)


def steps_of(prompt, responses, earlier, rules: Rules, context: int = CONTEXT) -> Steps:
    return verify(Record([Group("", prompt, responses, earlier)], context), rules)


def match(last: list[int], text: list[int], place: int) -> int:
    """Tokens before `place` that are the last ones of another text, at most `CONTEXT`."""
    length = 0
    while length < min(CONTEXT, place, len(last)) and text[place - 1 - length] == last[-1 - length]:
        length += 1
    return length


def spots(text: list[int]) -> list[tuple[list[int], int]]:
    """A text with each of its places, the newest first."""
    return [(text, place) for place in reversed(range(1, len(text)))]


Found = tuple[
    int, list[int]
]  # the length of the longest match that something follows, and the draft


def searched(last: list[int], known: list[tuple[list[int], int]]) -> tuple[Found, Found]:
    """A draft, and another that begins with another token.

    Args:
      known: texts with a place, the best to draft from first.
    """

    def longest(but: list[int]) -> Found:
        best, guess = 0, []
        for text, place in known:
            if text[place] not in but and (length := match(last, text, place)) > best:
                best, guess = length, text[place : place + DRAFT]
        return best, guess

    draft = longest([])
    return draft, longest(draft[1][:1])


def agreeing(guess: list[int], response: list[int]) -> int:
    count = 0
    for a, b in zip(guess, response, strict=False):
        if a != b:
            break
        count += 1
    return count


def step_by_step(responses, search, branch: int = 0) -> list[tuple[int, ...]]:
    """The number of the lockstep, the match and the tokens accepted, of every step and of its branch.

    Args:
      search: a match and a draft, and those of the branch, of the step, the row and what each has said so far.
      branch: most tokens of one that are accepted.
    """
    at, found, step = [0] * len(responses), [], 0
    while any(a < len(x) for a, x in zip(at, responses, strict=True)):
        output = [x[:a] for a, x in zip(at, responses, strict=True)]
        then = list(at)
        for row, response in enumerate(responses):
            if at[row] == len(response):
                continue
            (matched, guess), (beside, other) = search(step, row, output)
            accepted, branched = (agreeing(x, response[at[row] :]) for x in (guess, other))
            found.append((step, matched, accepted, beside, branched))
            then[row] += (accepted or min(branched, branch)) + 1
            then[row] = min(then[row], len(response))
        at, step = then, step + 1
    return found


def as_list(steps: Steps) -> list[tuple[int, ...]]:
    columns = steps.step, steps.matched, steps.accepted, steps.beside, steps.branched
    return list(zip(*(x.tolist() for x in columns), strict=True))


@given(prompts, texts, texts | st.just([]), st.booleans(), branches)
def test_texts_as_they_are_are_what_a_search_finds(prompt, responses, earlier, siblings, branch):
    """Of equally long matches the one that was said last, of those of a step the last row's; then those of
    earlier responses, which are whole."""
    rules = Rules(siblings, earlier=bool(earlier), draft=DRAFT, branch=branch)
    found = steps_of(prompt, responses, earlier, rules)
    whole = [spot for text in reversed(earlier) for spot in spots([*prompt, *text])]
    told: list[tuple[int, int]] = []  # the row and the place of each token, as they came

    def search(step, row, output):
        text = [*prompt, *output[row]]
        for i, x in enumerate(output if siblings else []):
            old = sum(j == i for j, _ in told)
            told.extend((i, place) for place in range(old, len(x)))
        newest = [([*prompt, *output[i]], len(prompt) + place) for i, place in reversed(told)]
        return searched(text, [*spots(text), *newest, *whole])

    assert as_list(found) == step_by_step(responses, search, branch)


def laid_out(prompt, output, responses, earlier) -> np.ndarray:
    """What the engine's rows draft from, when they have said so much of their responses."""
    known = [np.array([*prompt, *x]) for x in output]
    rows = np.arange(len(output))
    table = SimpleNamespace(
        num_replicas=1,
        rows_per_replica=len(output),
        running=rows,
        row=rows,
        length=np.array([len(x) for x in known]),
        prompt_length=np.full(len(output), len(prompt)),
        is_done=np.array([len(x) == len(y) for x, y in zip(output, responses, strict=True)]),
    )
    fake = SimpleNamespace(
        table=table, prompt=0 * rows, samples=lambda _: rows, known=known.__getitem__
    )
    before = EarlierResponses(1000, 1000)
    before.put(prompt, [np.array(text) for text in earlier])
    return engine_texts(cast(Any, fake), ROOM, own=24, earlier=before).columns


@settings(max_examples=30, deadline=None)  # compiles
@given(prompts, texts, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=2))
def test_texts_as_of_launch_are_what_the_engine_finds(prompt, responses, earlier):
    """With its own functions: how texts are laid out, and the search on the devices."""
    siblings = len(responses) > 1
    rules = Rules(siblings, earlier=True, draft=DRAFT, branch=DRAFT, burst=BURST)
    found = steps_of(prompt, responses, earlier, rules, context=ENGINE_CONTEXT)
    launched = np.zeros(0)

    def search(step, row, output):
        nonlocal launched
        if step % BURST == 0:
            launched = laid_out(prompt, output, responses, earlier)
        text, last = launched[row : row + 1].copy(), ROOM + len(prompt) + len(output[row])
        text[0, ROOM:last] = [*prompt, *output[row]]
        found = FIND(text, np.array([last - 1], np.int32), most=DRAFT)
        tokens = [np.asarray(x.tokens[0]) for x in found]
        return tuple(
            (int(x.matched[0]), y[y >= 0].tolist()) for x, y in zip(found, tokens, strict=True)
        )

    assert as_list(found) == step_by_step(responses, search, DRAFT)


@given(prompts, texts, texts)
def test_texts_that_find_no_room_are_not_drafted_from(prompt, responses, earlier):
    rules = Rules(True, True, draft=DRAFT, burst=BURST)
    with patch.multiple(draft_counting, LEAST_BUCKET=2, AHEAD_PART=2):
        none, some, every = (
            as_list(steps_of(prompt, responses, earlier, replace(rules, room=room)))
            for room in (0.0, 0.5, 1e6)
        )
    assert none == as_list(steps_of(prompt, responses, [], Rules(False, False, draft=DRAFT)))
    assert every == as_list(steps_of(prompt, responses, earlier, rules))
    # What has room is a part of what is there: the first step finds no longer match in it.
    assert all(x[1] <= y[1] for x, y in zip(some, every, strict=False) if y[0] == x[0] == 0)


def test_prompts_and_their_rows_do_not_look_at_each_other():
    rules = Rules(siblings=True, earlier=True, draft=DRAFT)
    groups = [
        Group("", [1, 2], [[3, 1, 2, 3, 1, 2], [2, 2, 2, 2]], [[3, 1, 2]]),
        Group("", [1, 2, 3], [[1, 2, 3, 1, 2, 3, 3]], []),
        Group("", [2], [[2, 3, 1], [2], [3, 1, 2, 3, 1]], [[2, 2], [3]]),
    ]
    together = verify(Record(groups, CONTEXT), rules)
    for number, group in enumerate(groups):
        alone = verify(Record([group], CONTEXT), rules)
        assert as_list(together.of(together.group == number)) == as_list(alone)
