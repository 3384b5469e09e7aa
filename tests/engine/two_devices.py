"""An engine on two devices that dispatches bursts ahead, and what its rollouts say."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from fakes import SETTINGS

from pat_jax.engine.device.draft.drafters import drafter_for
from pat_jax.engine.device.programs.decode import DecodeFunctions
from pat_jax.engine.device_executor import DeviceExecutor
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.layout.buckets import NO_DRAFTS, Drafts
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Split
from tests.lossless import EOS_IDS, MODELS, lively_params

DP2, TP2 = Split(2, 1), Split(1, 2)
POLICY = Policy.from_config(MODELS["kv2"])
CONFIG = replace(SETTINGS["kv2"].rollout, min_rows=1, min_length=32, burst_steps=8, check_every=4)


@cache
def engine(
    kv_pages: int = 0,
    capacity: int = 16,
    drafts: Drafts = NO_DRAFTS,
    min_rows: int = 2,
    policy: Policy = POLICY,
) -> RolloutEngine:
    """Each program is compiled when it is first needed."""
    made = RolloutEngine(
        policy,
        jax.devices()[:2],
        replace(CONFIG, kv_pages=kv_pages, min_rows=min_rows),
        capacity=capacity,
        eos_ids=EOS_IDS,
        drafter=drafter_for(drafts),
    )
    made.runs_ahead = True
    return made


def reading_pages(**sizes: Any) -> RolloutEngine:
    """As on a GPU or TPU: decodes from the pages where they lie, and a row that has ended goes on
    writing to them until the burst on its way is over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeFunctions, "_begin", lambda self, layout, pool, *_: pool)
        made = engine.__wrapped__(**sizes)
        made.compile()
    return made


def look_at_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page has to be free at the end of a rollout, and no NaN in it."""
    release = DeviceExecutor.release

    def checked(self: DeviceExecutor) -> None:
        if not (self.tables.table.has_work or self._running):
            assert self.tables.num_held == 0
            assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(self.pool.pages))
        release(self)

    monkeypatch.setattr(DeviceExecutor, "release", checked)


def generate(
    engine: RolloutEngine,
    requests: list[Request],
    planner: Planner,
    params: Params | None = None,
    **options,
) -> tuple[list[Completion], RolloutReport]:
    layout = engine.layouts[DP2]
    weights = lively_params(engine.policy) if params is None else params
    engine.set_weights(jax.device_put(weights, layout.param_shardings(engine.policy)), layout)
    report = RolloutReport()
    done = dict(engine.stream(requests, planner, report, **options))
    engine.release_weights()
    return [done[i] for i in range(len(requests))], report
