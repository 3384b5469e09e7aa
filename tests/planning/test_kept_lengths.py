"""What is kept of a length model: in a checkpoint, and when a run goes on with another cap."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from length_models import experienced_model, learned, log_normal, responses

from pat_jax.common.errors import UserError
from pat_jax.planning.lengths.model import LengthModel


@pytest.fixture(scope="module")
def experienced() -> LengthModel:
    return experienced_model()


class TestAnotherCap:
    ask = np.array([0, 1000]), np.array([4096, 3096]), np.arange(0, 4096, 64)

    @pytest.mark.parametrize("cap", [1024, 2048])
    def test_it_is_the_model_that_had_that_cap_from_the_start(self, cap):
        """Responses cut at 1,024 tokens say nothing of what comes after, in either."""
        lengths = np.minimum(log_normal(np.random.default_rng(5), 512, median=900), 1024)
        moved, known = (
            LengthModel.empty(cap).updated(lengths, lengths == 1024) for cap in (cap, 4096)
        )
        moved = moved.with_cap(4096)
        np.testing.assert_array_equal(moved.survival(*self.ask), known.survival(*self.ask))
        assert moved.survival(*self.ask)[1, -2] < 0.5
        one, other = (m.updated(4 * lengths, 4 * lengths >= 4096) for m in (moved, known))
        np.testing.assert_array_equal(one.baseline.cut, other.baseline.cut)

    def test_a_smaller_cap_forgets_nothing(self, experienced):
        there_and_back = experienced.with_cap(100).with_cap(experienced.cap)
        assert there_and_back.to_json() == experienced.to_json()
        alive = experienced.with_cap(100).survival(
            np.array([50]), np.array([50]), np.array([49, 50, 60])
        )[0]
        assert alive[0] > 0 and (alive[1:] == 0).all()


class TestJson:
    @given(responses, responses)
    def test_a_model_comes_back_exactly_and_goes_on_alike(self, first, second):
        model = replace(learned(first, prior_weight=0.7), keep=0.6)
        back = LengthModel.from_json(json.loads(json.dumps(model.to_json())))
        assert back.to_json() == model.to_json()
        lengths, is_cut, prompt = (np.array(column) for column in zip(*second, strict=True))
        after, after_back = (m.updated(lengths, is_cut, prompt) for m in (model, back))
        assert after.to_json() == after_back.to_json()
        ask = np.array([3, 4, 5]), np.array([50, 50, 50]), np.arange(50)
        np.testing.assert_array_equal(after.survival(*ask), after_back.survival(*ask))

    def test_an_older_version_is_refused(self):
        with pytest.raises(UserError, match="version 1, this is version 3"):
            LengthModel.from_json({"ended": [0.0], "cut": [0.0]})
