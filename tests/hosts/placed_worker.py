"""One of several processes of runs whose models have devices of their own, one run after the other.
The first one writes what they leave.

    python tests/hosts/placed_worker.py --judge DIR --out FOLDER --distributed.coordinator …
"""

import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path

from pat_jax.common.devices import configure
from pat_jax.common.hosts.join import join
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.together import process_group
from pat_jax.common.options.declared import Options
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse


@dataclass(frozen=True)
class Asked(Options):
    """Runs of PPO."""

    runs: str = ""
    """Names of folders, each with the options of a run behind a colon, one a line."""
    judge: str = ""
    """Directory of the reward model."""
    out: str = ""
    """Folder of all runs, and of what they leave."""
    devices: int = 4
    """Of all processes."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def main() -> None:
    options = parse(sys.argv[1:], Asked, presets=None)
    join(options.distributed)
    configure(options.devices)
    from placed_runs import ended
    from runs import presets_of_one_layer

    for line in options.runs.splitlines():
        name, _, asked = line.partition(":")
        with presets_of_one_layer("tiny"):
            found = ended(Path(options.out) / name, Path(options.judge), *asked.split())
        if process_group().is_first:
            (Path(options.out) / f"{name}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    run_command(main)
