"""One of several processes that save checkpoints together, one of which fails once in the second.

python tests/hosts/saving_worker.py --fault begin --at 1 --directory DIR --distributed.coordinator …
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint import CheckpointManager
from orbax.checkpoint._src.checkpointers import async_checkpointer

from pat_jax.common.devices import configure
from pat_jax.common.hosts import waiting
from pat_jax.common.hosts.join import join
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.together import process_group
from pat_jax.common.options.declared import Options
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse
from pat_jax.run.checkpoints import orbax_io as checkpoint_orbax
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.schedule import Saves
from pat_jax.run.roles.role_params import read_reference, save_reference

STEPS = 4
checkpoint_orbax.WRITE_S = 6
waiting.TROUBLE_S = 3.0


@dataclass(frozen=True)
class Asked(Options):
    """What goes wrong."""

    directory: str = ""
    """Of the checkpoints."""
    fault: str = ""
    """Where it does."""
    at: str = ""
    """In which processes, such as 0,1."""
    restores: bool = False
    """Restore the newest one, and save none."""
    reference: bool = False
    """Save the reference of a run in `directory`, or read it if `restores`, and nothing else."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def spoil(fault: str) -> None:
    """The second save fails in this process."""
    owner, name = {
        "asked": (CheckpointManager, "save"),
        "beginning": (async_checkpointer.AsyncCheckpointer, "_save"),
        "begun": (CheckpointManager, "save"),
        "written": (async_checkpointer, "_background_wait_for_commit_futures"),
        "written, and waited for": (CheckpointManager, "wait_until_finished"),
    }[fault]
    do, calls, is_late = getattr(owner, name), list[int](), fault == "begun"

    def poisoned(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        done = do(*arguments, **options) if len(calls) != 2 or is_late else None
        if len(calls) == 2:
            raise OSError(f"a mistake where it is {fault}")
        return done

    setattr(owner, name, poisoned)


def main() -> None:
    options = parse(sys.argv[1:], Asked, presets=None)
    join(options.distributed)
    configure(2)
    if str(process_group().index) in options.at.split(","):
        spoil(options.fault)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
    like = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    if options.reference and options.restores:
        print(f"read {float(total(read_reference(options.directory, 0, like))):.0f}")
        return
    if options.reference:
        save_reference(options.directory, jax.device_put(np.arange(8, dtype=np.float32), sharding))
        return
    checkpoints = Checkpointer(Path(options.directory), 9)
    if options.restores:
        step, state, _ = checkpoints.restore({"x": like})
        print(f"restored {step} {float(total(state['x'])):.0f}", *checkpoints.stepped_over)
        return
    saves = Saves(checkpoints, 1, STEPS, print)
    for step in range((checkpoints.latest_step() or 0) + 1, STEPS + 1):
        x = jax.device_put(np.arange(8, dtype=np.float32) * step, sharding)
        print(f"step {step} {float(total(x)):.0f}", flush=True)  # it takes all devices
        if saves.is_due(step):
            saves.save(step, {"x": x}, {})
    saves.end(STEPS, {"x": x}, {})
    checkpoints.close()


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]
    run_command(main)
