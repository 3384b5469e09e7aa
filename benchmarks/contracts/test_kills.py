"""Each stage of the kills is a function that there is."""

import pytest

from benchmarks.contracts.kills import STAGES, function_of


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_a_function(stage: str):
    owner, name, role = function_of(stage)
    assert callable(getattr(owner, name)) and role in ("", "critic", "train")
