"""`python -m pat_jax.sft`: supervised fine-tuning on files of prompts and completions, chats or texts.

What happens is in `run/sft/loop.py`.
"""

import sys
from functools import partial

from pat_jax.common.devices import configure
from pat_jax.config.command_line import parse, run_command
from pat_jax.config.sft import SftConfig
from pat_jax.run.folder import options_of_run
from pat_jax.run.meeting import check_places, meet
from pat_jax.run.sft.loop import SftRun
from pat_jax.run.sft.setup import build
from pat_jax.run.stop_signals import Stopped, StopSignals, leave

read = partial(parse, config_class=SftConfig, prog="python -m pat_jax.sft", presets=None)


def main() -> None:
    try:
        with StopSignals() as signals:
            config = meet(options_of_run(sys.argv[1:], read), signals)
            check_places(config)
            setup = build(config, configure(config.devices))
            SftRun(config, setup, signals).run()
    except Stopped as stop:
        leave(stop.exit_code)


if __name__ == "__main__":
    run_command(main)
