"""How the processes of a run find each other: by their cluster, by variables, or by options.

Must come before anything asks JAX for devices.
"""

import ast
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax._src.distributed import global_state  # its key-value store has no public name

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.link import Address, accept, connect, listen
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.together import Company, company, found

# JAX ends a process whose coordinator has been silent for so long; ours speaks up before (`link.py`).
HEARTBEAT_S = 60
SHUTDOWN_S = 30
_MEETING = "pat_jax/meeting"  # key of the first process's address


class Place(NamedTuple):
    """Of one process among those of a run."""

    coordinator: str | None  # host:port; None: JAX finds the processes by itself
    index: int = 0
    count: int = 0
    local_device: int | None = None  # the one device of this process; None: all of its machine


def join(config: DistributedConfig) -> Company:
    """Meets the other processes of this run, if there are any.

    Raises:
      UserError: they cannot be reached.
    """
    place = find_place(config, os.environ)
    if place is None or not company().is_alone:
        return company()
    known: dict[str, Any] = {} if place.coordinator is None else _arguments(place)
    # It would take SIGTERM for itself, and tell those alone who ask it between two steps.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=config.wait,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        where = place.coordinator or "the coordinator that the cluster names"
        raise UserError(
            f"the processes of this run did not meet at {where} within {config.wait} s "
            f"({str(error).splitlines()[0]:.120}): start all of them, with the same coordinator."
        ) from None
    index, count = global_state.process_id, global_state.num_processes
    assert index is not None and count is not None, "initialized"
    us = found(index, count, config.patience)
    if count > 1:
        _meet(us, config.wait)
    return us


def _arguments(place: Place) -> dict[str, Any]:
    own = {} if place.local_device is None else {"local_device_ids": [place.local_device]}
    return {
        "coordinator_address": place.coordinator,
        "num_processes": place.count,
        "process_id": place.index,
        **own,
    }


def _meet(us: Company, wait_s: int) -> None:
    store, coordinator = global_state.client, global_state.coordinator_address
    assert store is not None and coordinator is not None, "initialized"
    if us.is_first:
        host = coordinator.rpartition(":")[0].strip("[]")
        listener, address = listen(host)
        store.key_value_set_bytes(_MEETING, repr(tuple(address)).encode())
        us.meet(accept(listener, us.count - 1))
    else:
        text = store.blocking_key_value_get_bytes(_MEETING, 1000 * wait_s).decode()
        us.meet(connect(Address(*ast.literal_eval(text)), us.index))
        # The first process speaks for all; why this one ends it says by itself (`Company.fail`).
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the process ends


def find_place(config: DistributedConfig, variables: Mapping[str, str]) -> Place | None:
    """By the options; else by torchrun's variables; else by the cluster's, which JAX reads. None: alone.

    Raises:
      UserError: some of them are missing.
    """
    if config.coordinator:
        return Place(config.coordinator, config.process_id, config.num_processes)
    if int(variables.get("WORLD_SIZE", "1")) > 1:
        return _of_torchrun(variables)
    return Place(None) if in_cluster(variables) else None


def _of_torchrun(variables: Mapping[str, str]) -> Place:
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    if missing := [name for name in names if name not in variables]:
        raise UserError(
            f"environment variable WORLD_SIZE is {variables['WORLD_SIZE']}, but {missing[0]} is not set: "
            f"expected all of {', '.join(names)}; set it, or unset WORLD_SIZE."
        )
    host, port, rank, size = (variables[name] for name in names)
    is_one_of_several = int(variables.get("LOCAL_WORLD_SIZE", "1")) > 1
    local = (
        int(variables["LOCAL_RANK"]) if is_one_of_several and "LOCAL_RANK" in variables else None
    )
    return Place(f"{host}:{port}", int(rank), int(size), local)


def in_cluster(variables: Mapping[str, str]) -> bool:
    """Whether a scheduler has started several processes, which JAX knows how to find."""
    several = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    if any(
        variables.get(name, "1").isdigit() and int(variables.get(name, "1")) > 1 for name in several
    ):
        # An interactive shell has the first of them too, but no rank.
        return "SLURM_PROCID" in variables or "OMPI_COMM_WORLD_RANK" in variables
    hosts = variables.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return len([host for host in hosts if host]) > 1
