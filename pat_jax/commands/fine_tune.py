"""The commands that learn from files: `sft` and `reward_model`."""

import sys
from collections.abc import Callable

from pat_jax.config.fine_tuning import FineTuning
from pat_jax.run.files.folder import options_of_run
from pat_jax.run.process.stop_signals import Stopped, StopSignals, leave


def run(config: FineTuning, signals: StopSignals, command: str) -> None:
    # JAX, once the options are right
    from pat_jax.common.devices import configure
    from pat_jax.run.process.distributed import meet
    from pat_jax.run.sft.loop import SftRun
    from pat_jax.run.sft.setup import build

    config = meet(config, signals)
    SftRun(build(config, configure(config.devices)), signals, command).run()


def fine_tune(command: str, read: Callable[..., FineTuning]) -> None:
    """Runs `python -m pat_jax.COMMAND` with the command line's options, which `read` parses."""
    try:
        with StopSignals() as signals:
            config = options_of_run(sys.argv[1:], read)
            run(config, signals, command)
    except Stopped as stop:
        leave(stop.exit_code)
