"""`python -m pat_jax.train`: GRPO whose rollout changes its tensor parallelism while it runs.

What happens is in `run/loop.py`.
"""

import sys

from pat_jax.common.devices import configure
from pat_jax.config.command_line import parse, run_command
from pat_jax.run.export import check_export_dir
from pat_jax.run.folder import check_run_dir, options_of_run
from pat_jax.run.loop import Run
from pat_jax.run.scoring import open_scorer
from pat_jax.run.setup import build
from pat_jax.run.stop_signals import Stopped, StopSignals, leave
from pat_jax.run.trackers.asked_for import check_trackers


def main() -> None:
    try:
        with StopSignals() as signals:
            config = options_of_run(sys.argv[1:], parse)
            check_run_dir(config)
            check_trackers(config)
            check_export_dir(config)
            setup = build(config, configure(config.devices))
            with open_scorer(config, setup.task.rewards) as scorer:
                Run(config, setup, scorer, signals).run()
    except Stopped as stop:
        leave(stop.exit_code)


if __name__ == "__main__":
    run_command(main)
