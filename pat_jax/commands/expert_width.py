"""Replaces `--rollout.expert_width auto` by a number for a run's devices, before it is built."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from pat_jax.common.devices import Device
from pat_jax.config.placement import PlacementConfig
from pat_jax.config.run import RunConfig
from pat_jax.profiling.predict.expert_width import settled_width
from pat_jax.profiling.predict.targets import Target
from pat_jax.run.start.setup import model_config

log = logging.getLogger(__name__)
Run = TypeVar("Run", bound=RunConfig)


def with_width(config: Run, devices: Sequence[Device]) -> Run:
    """Returns the options with a number in place of `--rollout.expert_width auto`. They do
    not change without experts, on unknown devices, and if rollouts have their own devices."""
    rollout = config.rollout
    model = model_config(config.task, config.layout_choice, devices)
    if model.experts is None or config.placement not in (
        PlacementConfig(),
        PlacementConfig("auto"),
    ):
        return config
    if (target := Target.of(devices)) is None:
        return config
    width = settled_width(target, model, rollout, config.experts, rollout.num_responses)
    log.info("--rollout.expert_width is %d", width)
    return replace(config, rollout=replace(rollout, expert_width=width))
