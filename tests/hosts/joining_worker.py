"""A process that joins a run, or ends at a point on its way: ADDRESS COUNT INDEX [POINT]."""

import os
import signal
import sys
from typing import Any

import jax

from pat_jax.common.hosts import join as joining
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.common.run_command import run_command


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    address, count, index, *points = sys.argv[1:]
    if points == ["JAX's join"]:
        jax.distributed.initialize = die
    if points == ["the meeting"]:
        ProcessGroup.meet = die
    config = DistributedConfig(address, int(count), int(index))
    joining.join(config)


if __name__ == "__main__":
    run_command(main)
