"""After the warm-up of one device nothing is compiled: rollouts, drafts, updates."""

import pytest
from compilations import counted_compilations
from fakes import SETTINGS

from pat_jax.engine.device.draft.text_drafter import TextDrafter
from pat_jax.layout.buckets import Drafts
from pat_jax.planning.planner.scripts import FixedLayout
from tests.engine.after_warm_up import measured, run_compiling_nothing
from tests.engine.iterations import Iterations
from tests.lossless import MODELS, Settings, Subject, make_requests

pytestmark = pytest.mark.gpu
DRAFTED = Settings(
    min_rows=16,
    min_length=64,
    drafter=TextDrafter(Drafts(num_draft_tokens=(3,), longest=5, most_tokens=256, texts=8)),
)


@pytest.mark.usefixtures("exact_products")  # the trainer's log-probabilities are the rollout's
def test_iterations_compile_nothing():
    one = Iterations(Subject(MODELS["kv2"], SETTINGS["kv2"], num_devices=1))
    planner = FixedLayout(one.first.split)
    with counted_compilations() as events:
        for step, options in enumerate(({}, {"top_k": 5}, {"temperature": 1.3, "top_k": 0})):
            one.iterate(step, planner, **options)
    assert events == []


def test_rollouts_with_drafts_compile_nothing():
    one = Subject(MODELS["kv2"], DRAFTED, num_devices=1)
    priced, fixed = measured(one), one.static(1)
    run_compiling_nothing(one, make_requests(DRAFTED, seed=0), priced, fixed)
