"""Finds the profile of this model and these devices, for the planner."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax

from pat_jax.common.devices import KEPT_DIR, PROFILE_DIR, Device
from pat_jax.common.hosts.together import process_group
from pat_jax.config.rollout import RolloutConfig
from pat_jax.models.config import ModelConfig
from pat_jax.planning.latency.profile import Profile, ProfileError, Subject, read_profile

log = logging.getLogger(__name__)
WHOLE = {"expert_parallel": 0, "expert_width": 1}  # values that a subject leaves out


def profile_subject(
    model: ModelConfig, rollout: RolloutConfig, dtype: str, devices: Sequence[Device]
) -> Subject:
    split = {name: getattr(rollout, name) for name in WHOLE}
    others = {name: ways for name, ways in split.items() if ways != WHOLE[name] and ways}
    return Subject(
        backend=devices[0].platform,
        device_kind=devices[0].device_kind,
        num_devices=len(devices),
        # Padding of heads costs less than a profile's own corrections; pinned layouts have none.
        model={k: v for k, v in asdict(model).items() if k != "query_multiple"} | others,
        dtype=dtype,
        weights=rollout.weights,
        jax=jax.__version__,
    )


def find_profile(asked: str, subject: Subject) -> Profile | None:
    """Returns the profile to plan by. None: --profile, whose value is `asked`, is none, or there is
    no profile yet."""
    if asked == "none":
        return None
    if asked != "auto":
        return process_group().agree("profile", lambda: read_profile(Path(asked), subject))
    return process_group().agree("profile", lambda: _profile_of(subject))


def _profile_of(subject: Subject) -> Profile | None:
    """Returns the profile of this machine, if it was measured."""
    paths = [folder / subject.file_name for folder in (PROFILE_DIR, KEPT_DIR)]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    try:
        return read_profile(path, subject)
    except ProfileError as error:  # the user did not ask for this profile
        # What an earlier run has kept is measured again without the user.
        log.log(logging.INFO if path.parent == KEPT_DIR else logging.WARNING, "not used: %s", error)
        return None
