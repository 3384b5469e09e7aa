"""Engines whose drafts a model says: requests, a draft model, and how many of its tokens were right."""

from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.device.draft.draft_model import ModelDrafter
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.layout.buckets import Drafts
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.planner.planner import Planner
from tests.lossless import MODELS, Subject, lively_params, tally
from tests.near_ties import Tally

DRAFT = Policy.from_config(replace(MODELS["kv2"], num_layers=1))
KINDS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_k=12, top_p=0.9),
    Sampling(temperature=0.7, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3),
    Sampling(temperature=0.7, stop_token_ids=(5, 9, 17)),
)


def first_layer(shardings: Params | None, dtype: jnp.dtype) -> Params:
    """Of the policy's, which that model is without its last."""
    del dtype
    known = dict(jax.tree.leaves_with_path(lively_params(Policy.from_config(MODELS["kv2"]))))
    own = jax.tree_util.tree_map_with_path(lambda path, _: known[path], DRAFT.abstract_params)
    return jax.device_put(own, shardings)


DRAFTS = Drafts(num_draft_tokens=(3,), longest=3, most_tokens=256, has_model=True)
DRAFTER = ModelDrafter(DRAFTS, DRAFT, first_layer)


def requests() -> list[Request]:
    rng = np.random.default_rng(3)
    return [
        Request(
            tokens=tuple(rng.integers(3, 61, 10).tolist()),
            key=sequence_key(7, i),
            max_new_tokens=52 - i,
            sampling=KINDS[i % len(KINDS)],
            ignore_eos=i % 3 > 0,
        )
        for i in range(16)
    ]


def accepted(report: RolloutReport) -> float:
    """Of the tokens verified, how many were right."""
    assert report.accepted == report.tokens - report.busy_rows <= report.drafted
    return report.accepted / report.drafted


@cache
def without_drafts(one: Subject) -> list[Completion]:
    return one.run(requests(), one.static(1))[0]


def check(one: Subject, planner: Planner) -> RolloutReport:
    """Under the plan the tokens are those without drafts."""
    found, report = one.run(requests(), planner)
    total = sum(tally(one, requests(), without_drafts(one), [found]).values(), Tally())
    assert total.unexplained == total.judge_disagrees == 0
    assert total.compared > 0.9 * total.tokens > 400
    assert total.max_logprob_difference <= 1e-4
    return report


def with_share_of_the_last(whole: Subject, share: float) -> Subject:
    """The same policy, to which its last layer adds such a share of what it did."""
    one = copy(whole)
    one.params, one.judged_params = jax.tree.map(np.array, (one.params, one.judged_params))
    for params in (one.params, one.judged_params):
        last: Any = params["layers"][1]
        for weight in (last["attention"]["out"], last["mlp"]["down"]):
            weight[...] = share * weight[...]
    return one
