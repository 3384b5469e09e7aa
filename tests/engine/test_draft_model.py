"""A draft model says what its policy may say: no token changes, and its cache follows wherever sequences go."""

from copy import copy
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_early_exit import accepted, requests
from two_devices import look_at_pages

from pat_jax.engine.device.draft_model import DraftSource
from pat_jax.engine.layout.buckets import Drafts
from pat_jax.engine.report import RolloutReport
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import ScriptedPath, Step
from pat_jax.planning.types import Load, Plan, Split
from tests.lossless import MODELS, Settings, Subject, lively_params, tally
from tests.near_ties import Tally

DRAFT = Policy.from_config(replace(MODELS["kv2"], num_layers=1))
DRAFTS = Drafts(budgets=(3,), longest=3, most_tokens=256, has_model=True)


@pytest.fixture(autouse=True)
def every_page_is_free_at_the_end_and_no_nan_in_it(monkeypatch):
    look_at_pages(monkeypatch)


def first_layer(shardings: Params, dtype: jnp.dtype) -> Params:
    """Of the policy's, which that model is without its last."""
    del dtype
    known = dict(jax.tree.leaves_with_path(lively_params(Policy.from_config(MODELS["kv2"]))))
    own = jax.tree_util.tree_map_with_path(lambda path, _: known[path], DRAFT.abstract_params)
    return jax.device_put(own, shardings)


@cache
def whole() -> Subject:
    settings = Settings(
        min_rows=4, min_length=32, drafts=DRAFTS, draft=DraftSource(DRAFT, first_layer)
    )
    return Subject(MODELS["kv2"], settings)


def subject(share: float) -> Subject:
    """The draft model is the policy without its last layer, on pages of its own.

    Args:
      share: of what the last layer adds; 0: both say the same.
    """
    one = copy(whole())
    one.params = jax.tree.map(np.array, one.params)
    last = one.params["layers"][1]
    for weight in (last["attention"]["out"], last["mlp"]["down"]):
        weight[...] = share * weight[...]
    return one


@dataclass(frozen=True)
class NowAndThen(ScriptedPath):
    """Some bursts have drafts, and others none: the draft model has to catch up."""

    every: int = 3

    def plan(self, load: Load, current: Split) -> Plan:
        plan = super().plan(load, current)
        is_with = load.step // 8 % self.every > 0
        return replace(plan, budget=self.budget if is_with else 0)


def check(one: Subject, planner: Planner) -> RolloutReport:
    expected, _ = one.run(requests(), one.static(1))
    found, report = one.run(requests(), planner)
    total = sum(tally(one, requests(), expected, [found]).values(), Tally())
    assert total.unexplained == total.judge_disagrees == 0
    assert total.compared > 0.9 * total.tokens > 400
    assert total.max_logprob_difference <= 1e-4
    return report


def test_no_token_changes_and_a_model_that_says_the_same_is_right():
    one = subject(0.0)
    for tp in (1, 8):
        report = check(one, replace(one.static(tp), budget=3))
        # What is drafted behind the last token of a response is for nothing.
        assert accepted(report) > 0.85


def test_switches_and_bursts_without_drafts_change_no_token_either():
    """A model that says the same is always right as long as its cache has all that was said."""
    one = subject(0.0)
    for planner in (
        replace(one.adaptive((1, 8, 2), "mixed", 16), budget=3),
        NowAndThen(Split(8, 1), (Step(Split(2, 4), 10), Step(Split(4, 2), 4)), budget=3),
    ):
        report = check(one, planner)
        assert len(report.switches) == 2 and accepted(report) > 0.85
    assert {burst.budget for burst in report.bursts} == {0, 3}


def test_a_model_that_says_other_things_changes_none():
    one = subject(1.0)
    report = check(one, replace(one.static(2), budget=3))
    assert 2 / 61 < accepted(report) < 0.5
