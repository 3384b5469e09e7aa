"""Connects the processes of a run, found by their cluster, by variables, or by options.

Must come before anything asks JAX for devices. Uses JAX's own service and its key-value store, but
not `jax.experimental.multihost_utils`. Its `broadcast_one_to_all` and `process_allgather` run
programs on the devices (9 ms against 0.5 ms) and take arrays only. If a process is gone, they wait
forever or abort in C++. With our messages (`link.py`), all processes end with a sentence.
"""

import ast
import os
import sys
from typing import Any

import jax
from jax._src.distributed import global_state  # its key-value store has no public name

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.link import Address, accept, connect, listen
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.place import Place, find_place, job_token, located
from pat_jax.common.hosts.roll_call import roll_call, watched
from pat_jax.common.hosts.sockets import split
from pat_jax.common.hosts.together import ProcessGroup, found, process_group

# JAX ends a process whose coordinator is silent for so long; our message comes before (`link.py`).
HEARTBEAT_S = 60
SHUTDOWN_S = 30
_MEETING = "pat_jax/meeting"  # key of the first process's address


def join(config: DistributedConfig) -> ProcessGroup:
    """Connects to the other processes of this run, if there are any. Raises UserError if they
    cannot be reached."""
    place = find_place(config, os.environ)
    if place is None or not process_group().is_alone:
        return process_group()
    if place.coordinator is None:
        place = located(config.wait, os.environ)
    token = job_token(config, os.environ)
    bind, lines = roll_call(place, config.wait, token)
    with watched(lines, process_group().end):
        return _joined(place, config, bind, token)


def _joined(
    place: Place, config: DistributedConfig, bind: str | None, token: bytes
) -> ProcessGroup:
    # JAX's service would catch SIGTERM, and tell only programs that ask it between two steps.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **_arguments(place),
            coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", bind),
            initialization_timeout=config.wait,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the processes of this run did not meet at {place.coordinator} within {config.wait} s "
            f"({str(error).splitlines()[0]:.120}): start all of them, with the same coordinator."
        ) from None
    index, count = global_state.process_id, global_state.num_processes
    assert index is not None and count is not None, "initialized"
    us = found(index, count, config.patience)
    if count > 1:
        _meet(us, config.wait, token)
    return us


def _arguments(place: Place) -> dict[str, Any]:
    own = {} if place.local_device is None else {"local_device_ids": [place.local_device]}
    return {
        "coordinator_address": place.coordinator,
        "num_processes": place.count,
        "process_id": place.index,
        **own,
    }


def _meet(us: ProcessGroup, wait_s: int, token: bytes) -> None:
    store, coordinator = global_state.client, global_state.coordinator_address
    assert store is not None and coordinator is not None, "initialized"
    if us.is_first:
        listener, address = listen(split(coordinator)[0])
        store.key_value_set_bytes(_MEETING, repr(tuple(address)).encode())
        us.meet(accept(listener, address.key + token, us.count - 1, wait_s))
    else:
        text = store.blocking_key_value_get_bytes(_MEETING, 1000 * wait_s).decode()
        address = Address(*ast.literal_eval(text))
        us.meet(connect(address._replace(key=address.key + token), us.index))
        # The first process prints for all. This one prints only why it ends
        # (`ProcessGroup.fail`).
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
