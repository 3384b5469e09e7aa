"""An engine that only generates, from its options to a session: compiled, warmed up, its weights in.

Knows options and engines. Does not know where weights come from, nor what is asked of the session.
"""

import logging
import time
from collections.abc import Callable

import numpy as np

from pat_jax.common.bars import bar as progress_bar
from pat_jax.common.bars import note
from pat_jax.config.run import RunConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.session import Session
from pat_jax.engine.sizing.memory import engine_memory
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.planning.latency.profile import Profile, Subject
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.run.start.prepare import keep_profile, unseen_acceptance

log = logging.getLogger(__name__)

LoadWeights = Callable[[Layout], Params]


def open_session(
    config: RunConfig,
    engine: RolloutEngine,
    subject: Subject,
    profile: Profile | None,
    weights_in: LoadWeights,
    *,
    exit_head: np.ndarray | None = None,
    max_length: int | None = None,
    debug_nans: bool = False,
) -> Session:
    """Everything compiled, the weights in place.

    Args:
      subject: of the profile that is kept.
      profile: what is known of it.
      weights_in: gives the weights in a layout.
      exit_head: see `RolloutEngine.set_weights`.
      max_length, debug_nans: see `Session`.
    """
    log.info("%s", engine.drafting)
    within = () if engine.by_need and _is_alone(engine) else None
    started = time.perf_counter()
    if count := engine.to_compile(within):
        note(f"compiling {count} programs")
    with progress_bar(total=0, unit="program", desc="compiling") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        engine.compile(show, within)
    if count:
        note(f"compiled in {time.perf_counter() - started:.1f} s")
    planner = _planner(config, engine, subject, profile, weights_in)
    first = next(iter(engine.layouts.values()))
    engine.set_weights(weights_in(first), first, exit_head)
    return Session(engine, planner, max_length=max_length, debug_nans=debug_nans)


def _is_alone(engine: RolloutEngine) -> bool:
    """Whether nothing is to be planned: one layout, no groups to keep even, no drafts."""
    first, *others = engine.layouts
    return first.dp == 1 and not others and not engine.specs.drafts.budgets


def _planner(
    config: RunConfig,
    engine: RolloutEngine,
    subject: Subject,
    profile: Profile | None,
    weights_in: LoadWeights,
) -> Planner:
    if _is_alone(engine):
        return FixedLayout(next(iter(engine.layouts)))
    memory = engine_memory(engine, config.rollout)
    warmup = Warmup(engine, known=profile and profile.latency, recheck=True)
    started = time.perf_counter()
    latency, buckets = warmup.measure(weights_in), engine.specs.buckets
    names = ", ".join(map(str, engine.layouts))
    note(f"measured {names} in {time.perf_counter() - started:.1f} s")
    keep_profile(config, subject, profile, latency)
    return CostModelPlanner(
        tuple(engine.layouts),
        latency.on(buckets.rows, buckets.lengths),
        LengthModel.empty(buckets.lengths[-1]),
        memory=memory,
        acceptance=unseen_acceptance(engine.specs.drafts),
        drafts=engine.specs.drafts.limits,
    )
