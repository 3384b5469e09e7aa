"""The commands that learn from files: `sft` and `reward_model`."""

from pat_jax.common.devices import configure
from pat_jax.common.hosts.together import process_group
from pat_jax.config.fine_tuning import FineTuning
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.sft.loop import SftRun
from pat_jax.run.sft.setup import build
from pat_jax.run.start.given_rows import GivenRows


def run(config: FineTuning, signals: StopSignals, rows: GivenRows) -> None:
    """Makes a run. `rows` holds data that a Python program gave, whose files are in the options."""
    learning = SftRun(build(config, configure(config.devices)), signals)
    try:
        process_group().agree("rows", rows.keep)
        learning.run()
    finally:
        learning.files.release()
