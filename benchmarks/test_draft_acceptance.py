"""Counting drafts against a search through every place of every text, on made-up texts."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.draft_acceptance import SOURCES, steps_of

DRAFT, CONTEXT = 3, 4
texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=3)


def match(last: list[int], text: list[int], place: int) -> int:
    """Tokens before `place` that are the last ones of another text, at most `CONTEXT`."""
    length = 0
    while length < min(CONTEXT, place, len(last)) and text[place - 1 - length] == last[-1 - length]:
        length += 1
    return length


def best(last: list[int], known: list[tuple[list[int], int]]) -> int:
    """The length of the longest match that something follows.

    Args:
      known: texts, and how many tokens of each were there when the run that is looked up had ended.
    """
    return max(
        (match(last, text, place) for text, end in known for place in range(1, end)), default=0
    )


@given(st.lists(st.integers(0, 2), max_size=6), texts, texts)
def test_more_sources_never_make_a_match_shorter_and_no_step_is_free(prompt, responses, earlier):
    tokens = sum(map(len, responses))
    for sources in SOURCES.values():
        steps = steps_of(prompt, responses, earlier, sources, draft=DRAFT, context=CONTEXT)
        longest = max(map(len, responses))
        assert tokens / (DRAFT + 1) <= steps <= tokens
        assert steps >= -(-longest // (DRAFT + 1))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), min_size=1))
def test_own_text_alone_is_what_a_search_finds(prompt, response):
    steps, at = 0, 0
    while at < len(response):
        text = [*prompt, *response[:at]]
        longest = best(text, [(text, len(text))])
        # Of equally long matches the newest.
        places = [p for p in range(1, len(text)) if match(text, text, p) == longest > 0]
        guess = text[places[-1] : places[-1] + DRAFT] if places else []
        rest = response[at : at + len(guess) + 1]
        accepted = 0
        while accepted < min(len(guess), len(rest)) and guess[accepted] == rest[accepted]:
            accepted += 1
        at, steps = at + accepted + 1, steps + 1
    found = steps_of(prompt, [response], [], ("own",), draft=DRAFT, context=CONTEXT)
    assert found == steps


def test_a_sibling_that_has_said_it_is_drafted_from():
    said = list(range(10, 22))
    alone = steps_of([1], [said], [], ("own",), draft=DRAFT, context=CONTEXT)
    assert alone == len(said)  # nothing repeats
    late = [2, 3, 4, *said]  # the same, three steps behind
    both = steps_of([1], [said, late], [], ("own", "siblings"), draft=DRAFT, context=CONTEXT)
    assert both < alone + len(late)
    whole = steps_of([1], [late], [late], ("own", "earlier"), draft=DRAFT, context=CONTEXT)
    assert whole == -(-len(late) // (DRAFT + 1))
