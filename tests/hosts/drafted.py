"""Rollouts with drafts on four devices, and with moves, of one process or of several: what was said, and the
counts of drafts and of moves."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
from generated_drafts import DRAFTER

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.draft.drafters import NO_DRAFTER
from pat_jax.engine.device.draft.text_drafter import TextDrafter
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.layout.buckets import Drafts
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.policy import Policy
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import Load, Plan, Split
from tests.lossless import EOS_IDS, MODELS, Settings, lively_params

# The devices of a TP group are of one process, so that sums are rounded as in one; those of a switch are not.
DP4, DP2TP2 = Split(4, 1), Split(2, 2)
COPIED = TextDrafter(Drafts(num_draft_tokens=(3,), longest=5, most_tokens=256, texts=8))
POLICY = Policy.from_config(MODELS["kv2"])

Found = dict[str, Any]


def rollouts() -> dict[str, Found]:
    """By who drafts, and without drafts."""
    return {"texts": copied_drafts(), "a draft model": generated_drafts(), "nobody": evened()}


def copied_drafts() -> Found:
    """Samples that wait, one after the other, and draft from siblings and from what an earlier rollout said."""
    one, asked = engine(COPIED), requests(samples=6)
    once, _ = run(one, asked, FixedLayout(DP4))
    earlier = EarlierResponses(10_000, one.text_room)
    for i in range(0, 12, 6):  # of the first two prompts
        earlier.put(asked[i].tokens, [done.tokens for done in once[i : i + 3]])
    script = Step(DP2TP2, 6)
    planner = ScriptedPath(
        DP4, (script,), num_draft_tokens=3, accept_prob=Acceptance.unseen().accept_prob
    )
    return described(*run(one, asked, planner, earlier))


def generated_drafts() -> Found:
    planner = ScriptedPath(DP4, (Step(DP2TP2, 4),), num_draft_tokens=3)
    return described(*run(engine(DRAFTER), requests(samples=2), planner))


class Even(FixedLayout):
    """Moves requests to emptier replicas wherever that saves rows."""

    def decide(self, load: Load, current: Split, options=()) -> Plan:
        plan = super().decide(load, current, options)
        return replace(plan, replica=options[0]) if options else plan


def evened() -> Found:
    """All long responses begin in one replica."""
    asked = [
        replace(one, max_new_tokens=44 if i < 2 else 6) for i, one in enumerate(requests(samples=2))
    ]
    return described(*run(engine(NO_DRAFTER, min_rows=4), asked, Even(DP4)))


def engine(drafter: Drafter, *, min_rows: int = 8) -> RolloutEngine:
    devices = jax.devices()[:4]
    layouts, _ = layout_chain(factored_mesh(devices), POLICY.config)
    one = RolloutEngine(
        POLICY,
        devices,
        replace(Settings(min_rows=min_rows, min_length=64).rollout, burst_steps=8),
        capacity=8,
        eos_ids=EOS_IDS,
        layouts={split: layouts[split] for split in (DP4, DP2TP2)},
        drafter=drafter,
    )
    assert one.checks
    one.compile()
    return one


def requests(samples: int) -> list[Request]:
    """Of four prompts; at such a temperature that samples often go on alike."""
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(3, 61, 10).tolist()) for _ in range(4)]
    return [
        Request(
            prompt, sequence_key(7, i, k), 30 + 5 * k, Sampling(temperature=0.1), ignore_eos=True
        )
        for i, prompt in enumerate(prompts)
        for k in range(samples)
    ]


def run(
    one: RolloutEngine,
    asked: list[Request],
    planner: Planner,
    earlier: EarlierResponses | None = None,
) -> tuple[list[Completion], RolloutReport]:
    layout = one.layouts[DP4]
    params = jax.device_put(lively_params(POLICY), layout.param_shardings(POLICY))
    one.set_weights(params, layout)
    done, report = one.rollout(asked, planner, earlier=earlier)
    one.release_weights()
    return done, report


def described(done: list[Completion], report: RolloutReport) -> Found:
    return {
        "tokens": [one.tokens.tolist() for one in done],
        "steps": report.decode_steps,
        "drafted": report.drafted,
        "accepted": report.accepted,
        "by source": report.by_source,
        "layouts": report.trace.path,
        "moved": [move.sequences for move in report.balanced],
    }
