"""The commands that learn from files: `sft` and `reward_model`."""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pat_jax.commands.data_files import data_files, with_files
from pat_jax.common.hosts.together import process_group
from pat_jax.common.run_command import in_one_sentence
from pat_jax.config.fine_tuning import FineTuning
from pat_jax.config.from_python import Config
from pat_jax.run.files.folder import options_of_run
from pat_jax.run.process.in_process import in_program
from pat_jax.run.process.stop_signals import Stopped, StopSignals, leave
from pat_jax.run.start.given_rows import GivenRows

if TYPE_CHECKING:
    from pat_jax.run.results.saved_run import SavedRun

Read = Callable[..., FineTuning]


def run(config: FineTuning, signals: StopSignals, command: str, rows: GivenRows) -> str:
    """Trains, and returns the run's folder. `rows` holds data that a Python program gave instead of
    files."""
    # JAX, once the options are right
    from pat_jax.common.devices import configure
    from pat_jax.run.process.distributed import meet
    from pat_jax.run.sft.loop import SftRun
    from pat_jax.run.sft.setup import build

    config = meet(config, signals)
    with rows.placed(config.run_dir, data_files(config)) as paths:
        config = with_files(config, paths)
        learning = SftRun(build(config, configure(config.devices)), signals, command)
        try:
            process_group().agree("rows", lambda: rows.keep(config.run_dir, data_files(config)))
            learning.run()
        finally:
            learning.files.release()
    return config.run_dir


def fine_tune(command: str, read: Read) -> None:
    """Runs `python -m pat_jax.COMMAND` with the command line's options, which `read` parses."""
    try:
        with StopSignals() as signals:
            run(options_of_run(sys.argv[1:], read), signals, command, GivenRows())
    except Stopped as stop:
        leave(stop.exit_code)


def fine_tuned(
    command: str, read: Read, config_class: type, config: Config, options: Mapping[str, Any]
) -> "SavedRun":
    """Runs the command with options from Python, which belong to `config_class`."""
    from pat_jax.run.results.saved_run import SavedRun

    with in_one_sentence(), in_program() as signals:
        rows = GivenRows()
        argv = rows.words(config, options, config_class, presets=None)
        folder = run(options_of_run(argv, read), signals, command, rows)
    return SavedRun(folder)
