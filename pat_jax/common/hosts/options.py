"""Options of a run of several processes, on one machine or several."""

import re
from dataclasses import dataclass

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import Rule, count

MOST_PROCESSES = 10**6
_PLACE: Rule = (lambda x: x == "" or is_address(x), "host:port")


@dataclass(frozen=True)
class DistributedConfig(Options):
    """Several processes as one run: start the same command on each host. On TPU slices,
    SLURM, GKE, Open MPI and with torchrun's variables, processes find each other without
    options."""

    SECTION = "distributed."

    coordinator: str = option("", _PLACE)
    """Address (host:port) of process 0, which the other processes can reach. If it is empty, the
    cluster's environment tells where the processes are."""
    num_processes: int = option(1, count(1, MOST_PROCESSES))
    """Number of processes. Only needed together with --distributed.coordinator."""
    process_id: int = 0
    """Index of this process, from 0. Only needed together with --distributed.coordinator."""
    patience: int = option(3600, count(10, 10**6))
    """If a process makes no progress for this many seconds, all processes end. Set it longer than
    each of these takes: compiling one program, the slowest rewards of a rollout, one update."""

    def __post_init__(self):
        super().__post_init__()
        self.need(
            "process_id",
            0 <= self.process_id < self.num_processes,
            f"0 to {self.num_processes - 1}, by --distributed.num_processes",
        )
        self.need(
            "num_processes",
            bool(self.coordinator) == (self.num_processes > 1),
            "more than 1 with --distributed.coordinator, and 1 without it",
        )


def is_address(text: str) -> bool:
    """Returns whether the text is `host:port` or `[host]:port`, with a well-formed host."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w-]+\]|[^\s:\[\]/@]{1,253}):([0-9]{1,5})", text)
    if found is None or not found[1].isascii():
        return False
    labels = found[1].split(".")
    return 0 < int(found[2]) <= 65_535 and all(0 < len(label) < 64 for label in labels)
