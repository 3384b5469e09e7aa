"""What drafts are worth by what they are copied from: built in, or counted in recorded responses."""

import numpy as np
import pytest

from pat_jax.engine.device.draft.ngram import CONTEXT
from pat_jax.layout.buckets import Drafts
from pat_jax.planning.drafts import Acceptance
from pat_jax.profiling.simulate.draft_counting import Group, Record, Rules, verify
from pat_jax.profiling.simulate.draft_sources import (
    EARLIER,
    MOST_COUNTED,
    OWN,
    SIBLINGS,
    DraftSources,
)

DRAFTS = Drafts(num_draft_tokens=(7,), longest=7, most_tokens=64, texts=4)


def responses(seed: int, count: int, length: int = 200) -> list[list[int]]:
    """The same but for where they begin, and for a token in ten; nothing in one of them comes twice."""
    rng = np.random.default_rng(seed)
    text, begins = rng.permutation(length), rng.permutation(length)[:count]
    return [
        np.where(
            rng.random(length) < 0.1, 1000 + rng.permutation(length), np.roll(text, begin)
        ).tolist()
        for begin in begins
    ]


def counted(*groups: Group) -> DraftSources:
    return DraftSources.counted("made-up.jsonl", groups, DRAFTS, 8, 64)


def test_the_built_in_ones_say_where_they_are_from():
    found = DraftSources.built_in()
    own, siblings = found.known
    assert (own.name, siblings.name) == (OWN, SIBLINGS)
    # As benchmarks/results/draft_acceptance.json has the mean of seven models: 1.83 and 2.03.
    assert own.alone(8) == pytest.approx(1.83, rel=0.05)
    assert siblings.alone(8) == pytest.approx(2.03, rel=0.05)
    assert siblings.alone(8) == float(Acceptance.unseen().tokens(8, 8, 1))
    origin, alone = found.words(7)
    assert "1,261 responses of seven models" in origin and "--responses_file counts yours" in origin
    assert "with drafts of 7: 1." in alone


def test_siblings_and_earlier_responses_are_worth_more_than_ones_own_text():
    alike = responses(0, 8)
    found = counted(Group("", [1, 2], alike[:4], alike[4:]))
    own, siblings, earlier = found.known
    assert (own.name, siblings.name, earlier.name) == (OWN, SIBLINGS, EARLIER)
    # Nothing comes twice, so that no text has what its own drafts are right in.
    assert own.alone(7) < 1.01 < siblings.alone(7) < earlier.alone(7)
    assert found.of_every_rollout is siblings
    assert found.origin == "counted in made-up.jsonl: 4 responses to 1 prompts, 800 tokens"
    assert not any("counts yours" in text for text in found.words(7))


def test_what_is_counted_is_what_steps_say():
    """Of steps with drafts of seven, all of them verified: tokens over steps, by the same rules."""
    groups = [Group("", [i], responses(i, 4), []) for i in range(6)]
    _, siblings = counted(*groups).known
    rules = Rules(siblings=True, earlier=False, draft=7, burst=8, room=4.0)
    steps = len(verify(Record(groups, CONTEXT), rules))
    assert siblings.alone(7) == pytest.approx(6 * 4 * 200 / steps, rel=0.03)


def test_one_response_to_each_prompt_has_no_siblings_and_says_so():
    found = counted(*(Group("", [i], responses(i, 1), []) for i in range(3)))
    assert [source.name for source in found.known] == [OWN]
    assert found.of_every_rollout.name == OWN
    assert "made-up.jsonl has one response to each prompt" in found.words(7)[-1]


def test_rollouts_without_room_or_samples_have_their_own_text_alone():
    found = DraftSources.built_in()
    assert [source.name for source in found.within(DRAFTS, 8).known] == [OWN, SIBLINGS]
    assert [source.name for source in found.within(DRAFTS, 1).known] == [OWN]
    no_texts = Drafts(DRAFTS.num_draft_tokens, 7, 64, 0)
    assert [source.name for source in found.within(no_texts, 8).known] == [OWN]


def test_of_long_records_some_prompts_are_counted(monkeypatch):
    module = "pat_jax.profiling.simulate.draft_sources.MOST_COUNTED"
    monkeypatch.setattr(module, 500)
    assert MOST_COUNTED > 500
    found = counted(*(Group("", [i], responses(i, 1), []) for i in range(5)))
    assert "2 responses to 2 prompts, 400 tokens (drawn from 5 prompts)" in found.origin
    assert found.origin == counted(*(Group("", [i], responses(i, 1), []) for i in range(5))).origin


def test_of_drafts_that_a_model_says_the_acceptance_is_assumed_and_said():
    found = DraftSources.generated("early_exit:9", 0.7)
    (source,) = found.known
    assert found.of_every_rollout is source and source.acceptance.is_generated
    # 1 + p + p² …
    assert source.alone(3) == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    told = " ".join(found.words(7))
    assert "as assumed: each token with a probability of 0.7" in told
    assert "(--draft_acceptance)" in told and "from early_exit:9" in told
    assert "--responses_file" not in told
