"""What drafts are worth by what they are copied from, as built in, and as assumed of a model's."""

from dataclasses import replace

import pytest

from pat_jax.layout.buckets import Drafts
from pat_jax.planning.drafts import Acceptance
from pat_jax.profiling.simulate.draft_sources import OWN, SIBLINGS, DraftSources

DRAFTS = Drafts(num_draft_tokens=(7,), longest=7, most_tokens=64, texts=4)


def test_the_built_in_ones_say_where_they_are_from():
    found = DraftSources.built_in(DRAFTS, 8)
    own, siblings = found.known
    assert (own.name, siblings.name) == (OWN, SIBLINGS) and found.largest is siblings
    # As benchmarks/results/draft_acceptance.json has the mean of seven models: 1.83 and 2.03.
    assert own.alone(8) == pytest.approx(1.83, rel=0.05)
    assert siblings.alone(8) == pytest.approx(2.03, rel=0.05)
    assert siblings.alone(8) == float(Acceptance.unseen().tokens(8, 8, 1))
    origin, alone = found.words(7)
    assert "1,261 responses of seven models" in origin and "of a run has yours" in origin
    assert "with drafts of 7: 1." in alone


def test_rollouts_without_room_or_samples_have_their_own_text_alone():
    for drafts, samples in ((DRAFTS, 1), (replace(DRAFTS, texts=0), 8)):
        assert [x.name for x in DraftSources.built_in(drafts, samples).known] == [OWN]
