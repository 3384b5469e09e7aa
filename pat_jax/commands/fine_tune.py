"""The commands that learn from files: `sft` and `reward_model`."""

from pat_jax.commands.runs import data_files, with_files
from pat_jax.common.devices import configure
from pat_jax.common.hosts.together import process_group
from pat_jax.config.fine_tuning import FineTuning
from pat_jax.run.process.distributed import meet
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.sft.loop import SftRun
from pat_jax.run.sft.setup import build
from pat_jax.run.start.given_rows import GivenRows


def run(config: FineTuning, signals: StopSignals, rows: GivenRows) -> str:
    """Trains, and returns the run's folder. `rows` holds data that a Python program gave instead of
    files."""
    config = meet(config, signals)
    with rows.placed(config.run_dir, data_files(config)) as paths:
        config = with_files(config, paths)
        learning = SftRun(build(config, configure(config.devices)), signals)
        try:
            process_group().agree("rows", lambda: rows.keep(config.run_dir, data_files(config)))
            learning.run()
        finally:
            learning.files.release()
    return config.run_dir
