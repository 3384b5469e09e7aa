"""Rows that go through a text each: what a step finds there, and what it verifies."""

import numpy as np

from benchmarks.speculation.draft_counting import Group
from benchmarks.speculation.token_replay import MOST, Texts, chosen


def test_each_token_knows_what_a_draft_there_would_have_right():
    """A phrase is drafted from its first occurrence; new text has nothing to draft from."""
    phrase = list(range(100, 120))
    texts = Texts.of([Group("a", [1, 2, 3], [[*phrase, 7, *phrase, 9], [5, 6]], [])])
    assert texts.length.tolist() == [42, 2]
    right, matched = texts.right[texts.start[0] :], texts.matched[texts.start[0] :]
    assert not matched[:21].any() and not right[:21].any()
    assert right[22] == MOST and matched[22] == 1 and matched[30] == 9
    assert right[38] == 3 and right[41] == 0  # what follows the phrase is new


def test_the_best_tokens_of_a_replica_have_room():
    value = np.zeros((3, 2 * MOST))
    value[0, :3], value[1, :2], value[1, MOST] = (0.9, 0.5, 0.1), (0.8, 0.2), 0.3
    value[2, :7] = 0.01
    draft, branch = chosen(value, np.array([0, 0, 1]), room=6)
    assert draft.tolist() == [2, 1, 5] and branch.tolist() == [0, 1, 0]
