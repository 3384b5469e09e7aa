"""Several processes of one run on this machine, found by a port that is free."""

import socket
import subprocess
from collections.abc import Sequence

from runs import COMMAND, TINY, start

# Four devices, two in each of two processes; every layout is compiled before the first iteration.
SMALL = [*TINY, "--devices", "4", "--rollout.check_integrity", "true"]


def start_all(
    count: int, *options: str, each: Sequence[Sequence[str]] = (), program: Sequence[str] = COMMAND
) -> list[subprocess.Popen]:
    """`count` processes of one run.

    Args:
      each: options of each process alone.
    """
    own = each or [()] * count
    found = ["--distributed.coordinator", f"localhost:{free_port()}"]
    found += ["--distributed.num_processes", str(count)]
    return [
        start(*options, *own[i], *found, "--distributed.process_id", str(i), program=program)
        for i in range(count)
    ]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def ends(processes: Sequence[subprocess.Popen], *, timeout: float = 280) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    return [(one.returncode, generated) for one, generated in zip(processes, outputs, strict=True)]


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]
