"""Connects the processes of a run, which options, a launcher's variables or the cluster name.

Must come before anything asks JAX for devices. Uses JAX's own service, but not
`jax.experimental.multihost_utils`. Its `broadcast_one_to_all` and `process_allgather` run programs
on the devices (9 ms against 0.5 ms) and take arrays only. If a process is gone, they wait forever
or abort in C++. With our messages (`link.py`), all processes end with a sentence.
"""

import os
import sys
import time

import jax

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.place import Place, find_place, job_token, located
from pat_jax.common.hosts.roll_call import roll_call
from pat_jax.common.hosts.together import ProcessGroup, found, process_group

# JAX ends a process whose coordinator is silent for so long; our message comes before (`link.py`).
WAIT_S = 600  # how long to wait for the other processes at the start
HEARTBEAT_S = 60
SHUTDOWN_S = 30
_MOMENT_S = 1.0


def join(config: DistributedConfig) -> ProcessGroup:
    """Connects to the other processes of this run, if there are any, and returns the group of all.
    Raises UserError if they cannot be reached."""
    place = find_place(config, os.environ)
    if place is None or not process_group().is_alone:
        return process_group()
    if place.coordinator is None:
        place = located(WAIT_S, os.environ)
    bind, peers = roll_call(place, WAIT_S, job_token(config, os.environ))
    us = found(place.index, place.count, config.patience)
    if peers:
        us.meet(peers)  # before JAX's own join: if a process ends in it, the others say so
    _initialize(place, bind)
    if not us.is_first:
        # The first process prints for all. This one prints only why it ends
        # (`ProcessGroup.fail`).
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    return us


def _initialize(place: Place, bind: str | None) -> None:
    # JAX's service would catch SIGTERM, and tell only programs that ask it between two steps.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            None if place.local_device is None else [place.local_device],
            coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", bind),
            initialization_timeout=WAIT_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        time.sleep(_MOMENT_S)  # if another process has ended, which is why, a thread says so
        raise UserError(
            f"the processes of this run did not meet at {place.coordinator} within {WAIT_S} s "
            f"({str(error).splitlines()[0]:.120}): start all of them, with the same coordinator."
        ) from None
