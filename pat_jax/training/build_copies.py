"""Builds readers with copies of the parameters of a run's models, on half of their devices.

Knows roles and options. Does not know when anything is read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import Sharding

from pat_jax.common.devices import Device
from pat_jax.common.rules import require
from pat_jax.config.compute import Compute
from pat_jax.config.run import RunConfig
from pat_jax.layout.layout import Layout, least_tp
from pat_jax.models.policy import Params
from pat_jax.rl.batches.packing import Shape
from pat_jax.training.build import predictor_of
from pat_jax.training.carrier import is_in_each_process
from pat_jax.training.copied_reader import CopiedReader, frozen_params
from pat_jax.training.reader import Reader
from pat_jax.training.roles import REFERENCE, Roles, States
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import Trainer


class HalfLayouts(NamedTuple):
    """Layouts of a role on half of its devices."""

    # Of all its devices. Each half holds all parameters, or each process if there are several.
    source: Layout
    target: Layout  # of the half, with the same shards


def half_layouts(config: RunConfig, held: TrainableParams, half: Sequence[Device]) -> HalfLayouts:
    """Returns the layouts by which a role's parameters come to a half of its devices.

    Raises:
      OptionError: the half divides the model in another way than all devices.
    """
    whole, model = held.layout, held.policy.config
    processes = len({device.process_index for device in half})
    size = copy_shards(config.fsdp_size, len(half), processes)
    source = least_tp(list(whole.mesh.devices.flat), model, fsdp_size=size)
    target = replace(least_tp(half, model, fsdp_size=size), kernels=whole.kernels)
    is_alike = source.split.tp == target.split.tp == whole.split.tp
    expected = (
        f"0: {len(half)} devices divide a model by {target.split.tp}, all by {whole.split.tp}"
    )
    require(is_alike, "placement.tail", config.placement.tail, expected)
    if processes > 1:
        for each in {*zip(*_shardings(held, source, target), strict=True)}:
            expected = f"0: half of each of {processes} processes divides a model in another way"
            require(is_in_each_process(*each), "placement.tail", config.placement.tail, expected)
    return HalfLayouts(source, target)


def _shardings(
    held: TrainableParams, source: Layout, target: Layout
) -> tuple[Sequence[tuple[int, ...]], Sequence[Sharding], Sequence[Sharding]]:
    """Returns the shape of each parameter, and its shardings in both layouts."""
    shapes = [x.shape for x in jax.tree.leaves(held.abstract)]
    by_layout = (layout.param_shardings(held.policy, role="train") for layout in (source, target))
    here, there = map(jax.tree.leaves, by_layout)
    return shapes, here, there


def copy_shards(fsdp_size: int, half: int, num_processes: int = 1) -> int:
    """Returns over how many of the `half` devices each copy of a model is divided.

    Each process must hold all parts that its devices of the half need. Where the model is divided
    inside each process (`fsdp_size`), so are its copies.
    """
    inside = half // num_processes
    if fsdp_size and fsdp_size <= 2 * inside:
        return min(fsdp_size, inside)
    # An odd number of processes has no two whose halves make up one.
    return inside if num_processes > 1 and num_processes % 2 else min(half, 2 * inside)


def copied_readers(
    config: RunConfig, roles: Roles, half: Sequence[Device]
) -> Iterator[CopiedReader]:
    """Yields a reader on `half` for each column that is predicted before an update."""
    make = partial(_copied, config, roles.micro_shapes, half)
    for name, role in roles.readers.items():
        if not role.top_k:
            yield make(name, role.column, role.held, partial(frozen_params, role))
    for role in roles.trained:
        if role.predicts:
            yield make(role.name, role.old, role.trained, partial(_present, role))


def _copied(
    config: RunConfig,
    micro_shapes: Sequence[Shape],
    half: Sequence[Device],
    name: str,
    column: str,
    held: TrainableParams,
    params: Callable[[States], Params],
) -> CopiedReader:
    source, target = half_layouts(config, held, half)
    predictor = predictor_of(
        config.compute if name == REFERENCE else Compute(config.compute_dtype),
        held.policy,
        target,
        temperature=config.rollout.temperature,
    )
    reader = Reader(column, replace(held, layout=target), predictor, micro_shapes)
    return CopiedReader(reader, held, source, params)


def _present(role: Trainer, states: States) -> Params:
    return states[role.name].params
