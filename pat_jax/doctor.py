"""`python -m pat_jax.doctor`: examines a machine in about a minute, and says what to do.

Examines devices, versions, memory, links, every kernel against plain operations, a switch there and
back, and one iteration of training. If one part fails, the others are still examined. The exit code
is 0 if all is well, and 1 if not.
"""

import shlex
import sys

from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse
from pat_jax.profiling.doctor.config import DoctorConfig


def main() -> None:
    config = parse(sys.argv[1:], DoctorConfig, prog="python -m pat_jax.doctor", presets=None)
    from pat_jax.commands.doctor import examine  # and JAX, once the options are right

    command = shlex.join(["python", "-m", "pat_jax.doctor", *sys.argv[1:]])
    raise SystemExit(examine(config, command))


if __name__ == "__main__":
    run_command(main)
