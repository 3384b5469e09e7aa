"""Warms up and measures the layouts of a run, and builds the planner of its rollouts."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pat_jax.common.devices import KEPT_DIR, PROFILE_DIR
from pat_jax.common.hosts.together import process_group
from pat_jax.config.run import RunConfig
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.layout.buckets import Drafts
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.latency.profile import Profile, Subject, load_profile
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.run.start.setup import Setup

log = logging.getLogger(__name__)


def warm_up(
    config: RunConfig,
    setup: Setup,
    load_weights: Callable[[Layout], Params],
) -> LatencyModel:
    """Runs the compiled programs. Measures what the profile lacks, and checks what it has: a
    machine changes, and a wrong profile costs more than these few runs."""
    known = setup.profile and setup.profile.latency
    measured = Warmup(setup.engine, known=known, recheck=True).measure(load_weights)
    keep_profile(config, setup.subject, setup.profile, measured)
    return measured


def keep_profile(
    config: RunConfig, subject: Subject, known: Profile | None, measured: LatencyModel
) -> None:
    """Saves what was measured for the next start on this machine, unless `pat_jax.profile` has a
    profile of it. Its folder is another one: that command measures more bursts, and must not take
    these few for its own."""
    measured_in_full = PROFILE_DIR / subject.file_name
    if config.profile != "auto" or measured_in_full.exists() or not process_group().is_first:
        return
    profile = replace(known or Profile(subject, measured), latency=measured)
    try:
        profile.save(KEPT_DIR / subject.file_name)
    except OSError as error:
        log.warning("the profile could not be kept: %s", error)


def cost_planner(
    config: RunConfig, setup: Setup, latency: LatencyModel, lengths: LengthModel
) -> CostModelPlanner:
    specs = setup.engine.specs
    return CostModelPlanner(
        tuple(setup.engine.layouts),
        latency.on(specs.buckets.rows, specs.buckets.lengths),
        lengths,
        carry=config.rollout.kv_carry,
        is_frozen=config.deterministic,
        memory=setup.memory,
        acceptance=unseen_acceptance(specs.drafts),
        drafts=specs.drafts.limits,
    )


def unseen_acceptance(drafts: Drafts) -> Acceptance | None:
    """Returns the acceptance assumed before any draft was verified, or None without drafts."""
    return Acceptance.unseen(is_generated=drafts.is_generated) if drafts.num_draft_tokens else None


def frozen(
    config: RunConfig,
    setup: Setup,
    folder: Path,
    measured: LatencyModel,
    notify: Callable[[str], None],
) -> LatencyModel:
    """Saves the measured profile and returns it. With `--deterministic`, returns instead the one
    that the run began with, if there is one."""
    path = folder / "profile.json"
    if config.deterministic and path.exists():
        kept = load_profile(path, setup.subject).latency
        if kept.covers(measured):
            return kept
        notify(f"{path} is of other shapes: measured anew")
    Profile(setup.subject, measured).save(path)
    return measured
