"""Supervised fine-tuning, once its options are read."""

from pat_jax.common.devices import configure
from pat_jax.config.sft import SftConfig
from pat_jax.run.process.distributed import meet
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.sft.loop import SftRun
from pat_jax.run.sft.setup import build


def run(config: SftConfig, signals: StopSignals) -> None:
    config = meet(config, signals)
    setup = build(config, configure(config.devices))
    SftRun(setup, signals).run()
