"""Options of a run that is several processes, on one machine or on many."""

import re
from dataclasses import dataclass

from pat_jax.common.rules import Rule, check, count, require

MOST_PROCESSES = 10**6
_PLACE: Rule = (lambda x: x == "" or is_address(x), "host:port")


@dataclass(frozen=True)
class DistributedConfig:
    """Several processes as one run: the same command on each host. TPU slices, SLURM, GKE,
    Open MPI and what torchrun's variables name are found without options."""

    coordinator: str = ""
    """host:port of process 0, which the others can reach; empty finds the processes by the cluster."""
    num_processes: int = 1
    """How many processes there are; with coordinator."""
    process_id: int = 0
    """Which of them this one is, from 0; with coordinator."""
    wait: int = 300
    """Seconds to wait for the others at the start."""
    patience: int = 3600
    """Seconds after which all end where a process comes to nothing new: more than compiling one
    program, the slowest rewards of a rollout, or an update on the devices take."""

    def __post_init__(self):
        check(self, "coordinator", _PLACE, "distributed.")
        check(self, "num_processes", count(1, MOST_PROCESSES), "distributed.")
        check(self, "wait", count(1, 10**6), "distributed.")
        check(self, "patience", count(10, 10**6), "distributed.")
        require(
            0 <= self.process_id < self.num_processes,
            "distributed.process_id",
            self.process_id,
            f"0 to {self.num_processes - 1}, by --distributed.num_processes",
        )
        require(
            bool(self.coordinator) == (self.num_processes > 1),
            "distributed.num_processes",
            self.num_processes,
            "more than 1 with --distributed.coordinator, and 1 without it",
        )


def is_address(text: str) -> bool:
    """Whether it is `host:port` or `[host]:port`, with a host that could be one."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w-]+\]|[^\s:\[\]/@]{1,253}):([0-9]{1,5})", text)
    if found is None or not found[1].isascii():
        return False
    labels = found[1].split(".")
    return 0 < int(found[2]) <= 65_535 and all(0 < len(label) < 64 for label in labels)
