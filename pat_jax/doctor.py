"""`python -m pat_jax.doctor`: examines a machine in about a minute, and says what to do.

If one part fails, the others are still examined. The exit code is 0 if all is well, and 1 if not.
"""

import os
import shlex
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from pat_jax.common.bars import is_cell
from pat_jax.common.run_command import offer
from pat_jax.config.command_line import parse
from pat_jax.config.from_python import Config, words
from pat_jax.profiling.doctor.config import DoctorConfig
from pat_jax.run.process.in_process import in_program

if TYPE_CHECKING:
    from pat_jax.profiling.doctor.report import Report

PROG = "python -m pat_jax.doctor"


def main() -> None:
    config = parse(sys.argv[1:], DoctorConfig, prog=PROG, presets=None)
    from pat_jax.commands.doctor import examine  # and JAX, once the options are right

    # The iteration's output is captured. A verdict on a hang must still reach the terminal.
    tell = partial(print, file=sys.stdout, flush=True)
    report = examine(
        config, shlex.join([*PROG.split(), *sys.argv[1:]]), lambda _: os._exit(1), tell
    )
    raise SystemExit(0 if report.ok else 1)


def doctor(config: Config = None, **options: Any) -> "Report":
    """Examines this machine in about a minute, as `python -m pat_jax.doctor` does.

        report = pat_jax.doctor(model="qwen3-8b")
        print(report.ok, [check.sentence for check in report.checks if not check.is_well])

    A part that takes longer than `step_seconds` fails. It is named on the screen, and the call goes
    on to wait for it.

    Args:
      config: a YAML file, or a dictionary of options.
      options: win over `config`, by the names that `python -m pat_jax.doctor --help` lists.

    Returns:
      Whether all is well, a verdict, and each check with its name, sentence, seconds and figures.
      `print` shows the command's lines.

    Raises:
      UserError: one sentence about a wrong option. What is wrong with the machine is in the report.
    """
    from pat_jax.commands.doctor import examine

    screen = sys.stdout if is_cell(sys.stdout) else sys.stderr  # the iteration's is captured
    with in_program():
        argv = words(config, options, DoctorConfig, presets=None)
        asked = parse(argv, DoctorConfig, prog=PROG, presets=None)
        return examine(asked, f"{PROG} {shlex.join(argv)}", partial(print, file=screen))


offer(doctor, main)
