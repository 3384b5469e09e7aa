"""Finds which process of a run this one is, by options or by the variables of a launcher.

Knows environment variables. Asks JAX only for the processes of a cluster that JAX finds by itself
(`located`).
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jax._src.clusters import ClusterEnv  # JAX looks clusters up by it; it has no public name

from pat_jax.common.errors import UserError, shown
from pat_jax.common.hosts.options import MOST_PROCESSES, DistributedConfig, is_address

_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
# The variables of each kind of cluster: the number of processes, and the index of this one.
_CLUSTERS = (("SLURM_NTASKS", "SLURM_PROCID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"))
_READ_BY_JAX = (
    *("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID", "OMPI_MCA_orte_hnp_uri"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
    *("JAX_COORDINATOR_PORT", "JAX_COORDINATOR_ADDRESS"),
)
_MOST_PORT = 65_535
TOKEN = "PAT_JAX_JOB_TOKEN"  # variable that all processes of a job share, and nobody else


class Place(NamedTuple):
    """The index of a process in its run, and the address where all processes of the run meet."""

    coordinator: str | None  # host:port; None: JAX finds the processes by itself
    index: int = 0
    count: int = 0
    local_device: int | None = None  # the only device of this process; None: all of its machine


def find_place(config: DistributedConfig, variables: Mapping[str, str]) -> Place | None:
    """Returns the place of this process in its run, or None if it is the only process. Reads the
    options, else torchrun's variables, else those of the cluster, which JAX reads. Raises UserError
    if some variables are missing or wrong."""
    if config.coordinator:
        return Place(config.coordinator, config.process_id, config.num_processes)
    if _number(variables, "WORLD_SIZE", 1, MOST_PROCESSES, otherwise=1) > 1:
        return _of_torchrun(variables)
    return Place(None) if in_cluster(variables) else None


def job_token(config: DistributedConfig, variables: Mapping[str, str]) -> bytes:
    """Returns a text that all processes of a job share, and others do not. It has the variable
    TOKEN and the launcher's names for the job, and is empty if there is neither."""
    names = "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"
    if config.coordinator:
        names = ()
    elif _number(variables, "WORLD_SIZE", 1, MOST_PROCESSES, otherwise=1) > 1:
        names = ("TORCHELASTIC_RUN_ID",)
    found = [f"{name}={variables[name]}" for name in (TOKEN, *names) if variables.get(name)]
    return "\n".join(found).encode("utf-8", "surrogateescape")


def in_cluster(variables: Mapping[str, str]) -> bool:
    """Returns whether a scheduler has started several processes that JAX can find. Raises UserError
    if a variable with their number or index is wrong."""
    for size, rank in _CLUSTERS:
        if rank not in variables:
            continue  # an interactive shell has only the size
        count = _number(variables, size, 1, MOST_PROCESSES, otherwise=1)
        if count > 1:
            _number(variables, rank, 0, count - 1)
            return True
    hosts = variables.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return len([host for host in hosts if host]) > 1


def located(wait_s: int, variables: Mapping[str, str]) -> Place:
    """Returns the `Place` that JAX finds for this process in a cluster. Raises UserError if the
    cluster's variables do not tell it."""
    try:
        coordinator, count, index, local = ClusterEnv.auto_detect_unset_distributed_params(
            variables.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, wait_s
        )
    # Errors that JAX's cluster classes raise for missing or wrong variables, or unknown hosts.
    except (KeyError, ValueError, IndexError, TypeError, RuntimeError, OSError) as error:
        raise _unreadable(variables, f"{type(error).__name__}: {error}") from None
    if coordinator is None or count is None or index is None or not is_address(coordinator):
        raise _unreadable(variables, f"the coordinator is {coordinator!r}")
    if not 0 <= index < count:
        raise _unreadable(variables, f"this is process {index} of {count}")
    return Place(coordinator, index, count, local[0] if local else None)


def _of_torchrun(variables: Mapping[str, str]) -> Place:
    if missing := [name for name in _TORCHRUN if name not in variables]:
        raise UserError(
            f"environment variable WORLD_SIZE is {shown(variables['WORLD_SIZE'])}, but {missing[0]} is not "
            f"set: expected all of {', '.join(_TORCHRUN)}; set it, or unset WORLD_SIZE."
        )
    size = _number(variables, "WORLD_SIZE", 1, MOST_PROCESSES)
    index = _number(variables, "RANK", 0, size - 1)
    port = _number(variables, "MASTER_PORT", 1, _MOST_PORT)
    host = variables["MASTER_ADDR"].strip()
    if not is_address(address := f"{host}:{port}"):
        raise _wrong("MASTER_ADDR", variables["MASTER_ADDR"], "the name or address of a host")
    local = None
    here = _number(variables, "LOCAL_WORLD_SIZE", 1, MOST_PROCESSES, otherwise=1)
    if here > 1 and "LOCAL_RANK" in variables:
        local = _number(variables, "LOCAL_RANK", 0, here - 1)
    return Place(address, index, size, local)


def _number(
    variables: Mapping[str, str], name: str, least: int, most: int, otherwise: int | None = None
) -> int:
    """Returns the integer in a variable, or `otherwise` if it is not set. Raises UserError if it is
    not between `least` and `most`."""
    if otherwise is not None and name not in variables:
        return otherwise
    text = variables[name].strip()
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise _wrong(name, variables[name], f"an integer from {least} to {most:,}")
    return int(text)


def _wrong(name: str, value: str, expected: str) -> UserError:
    return UserError(
        f"environment variable {name} is {shown(value)}: expected {expected}; set it, or unset it, and name "
        "the processes with --distributed.coordinator, --distributed.num_processes and "
        "--distributed.process_id."
    )


def _unreadable(variables: Mapping[str, str], why: str) -> UserError:
    names = [name for pair in _CLUSTERS for name in pair]
    found = [name for name in (*names, *_READ_BY_JAX) if name in variables]
    return UserError(
        f"the variables of this cluster do not say where its processes are ({why}): expected "
        f"{', '.join(found)} as the scheduler sets them; start the processes by it, or name them with "
        "--distributed.coordinator, --distributed.num_processes and --distributed.process_id."
    )
