"""Warms up and measures the layouts of a run, and builds the planner of its rollouts."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pat_jax.common.devices import KEPT_DIR, PROFILE_DIR
from pat_jax.common.hosts.together import process_group
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.latency.profile import Profile, Subject, read_profile
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.planner import CostModelPlanner

log = logging.getLogger(__name__)


def warm_up(
    asked: str,
    engine: RolloutEngine,
    subject: Subject,
    known: Profile | None,
    load_weights: Callable[[Layout], Params],
) -> LatencyModel:
    """Runs the compiled programs. Measures the times that the profile `known` lacks, and checks
    those that it has: a machine changes, and a wrong profile costs more than these few runs. Keeps
    the times if `asked`, the value of --profile, is auto."""
    warmup = Warmup(engine, known=known and known.latency, recheck=True)
    measured = warmup.measure(load_weights)
    if asked == "auto" and process_group().is_first:
        _keep(subject, known, measured)
    return measured


def _keep(subject: Subject, known: Profile | None, measured: LatencyModel) -> None:
    """Saves the measured times for the next start on this machine, unless `pat_jax.profile` has a
    profile of it. Uses another folder: that command measures more bursts, and must not mistake
    these few for its own."""
    if (PROFILE_DIR / subject.file_name).exists():
        return
    profile = replace(known or Profile(subject, measured), latency=measured)
    try:
        profile.save(KEPT_DIR / subject.file_name)
    except OSError as error:
        log.warning("the profile could not be kept: %s", error)


def cost_planner(
    engine: RolloutEngine,
    latency: LatencyModel,
    lengths: LengthModel,
    memory: MemoryModel,
    *,
    is_frozen: bool = False,
) -> CostModelPlanner:
    specs = engine.specs
    drafts = specs.drafts
    unseen = Acceptance.unseen(is_generated=drafts.is_generated)
    return CostModelPlanner(
        tuple(engine.layouts),
        latency.on(specs.buckets.rows, specs.buckets.lengths),
        lengths,
        is_frozen=is_frozen,
        memory=memory,
        acceptance=unseen if drafts.num_draft_tokens else None,
        drafts=drafts.limits,
    )


def frozen(
    subject: Subject,
    folder: Path,
    measured: LatencyModel,
    notify: Callable[[str], None],
    *,
    is_deterministic: bool,
) -> LatencyModel:
    """Saves the measured profile and returns it. With `--deterministic`, returns the profile that
    the run began with instead, if there is one."""
    path = folder / "profile.json"
    if is_deterministic and path.exists():
        kept = read_profile(path, subject).latency
        if kept.covers(measured):
            return kept
        notify(f"{path} is of other shapes: measured anew")
    Profile(subject, measured).save(path)
    return measured
