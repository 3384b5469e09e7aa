"""`python -m pat_jax.plan`: predicts the gain of adaptive TP on machines that you do not have.

Compiles the engine's own programs with the target's compiler, and counts what they hold and send.
Predicts the time of steps and updates, and replays rollouts with the engine's planner. Prints a
table, and writes a JSON report, a picture and an HTML page into the run folder.
"""

import shlex
import sys
from typing import TYPE_CHECKING, Any

from pat_jax.common.run_command import offer
from pat_jax.config.command_line import parse
from pat_jax.config.from_python import Config, words
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.run.process.in_process import in_program

if TYPE_CHECKING:
    from pat_jax.commands.plan import Planned


def main() -> None:
    config = parse(sys.argv[1:], PlanConfig, prog="python -m pat_jax.plan", presets=None)
    from pat_jax.commands.plan import made_plan  # and JAX, once the options are right

    found = made_plan(config, f"python -m pat_jax.plan {shlex.join(sys.argv[1:])}")
    print(found)
    print(f"\nreport {found.page}, figures {found.figures}")


def plan(config: Config = None, **options: Any) -> "Planned":
    """Plans adaptive TP for machines that you do not have, as `python -m pat_jax.plan` does. Raises
    UserError, one sentence about what is wrong.

        pat_jax.plan(model="llama-3.1-8b", target="h100:8", responses=1024, compile=False)

    Args:
      config: a YAML file, or a dictionary of options.
      options: win over `config`, by the names that `python -m pat_jax.plan --help` lists.
    """
    from pat_jax.commands.plan import made_plan

    with in_program():
        argv = words(config, options, PlanConfig, presets=None)
        found = parse(argv, PlanConfig, prog="python -m pat_jax.plan", presets=None)
        return made_plan(found, f"python -m pat_jax.plan {shlex.join(argv)}")


offer(plan, main)
