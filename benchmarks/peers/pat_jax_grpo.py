"""`pat_jax.train` with the options given, each iteration when it is its turn.

Run by `iteration_vs_peers.py`, with the Python that runs it.
"""

import sys

import jax
from turns import Turns

from pat_jax.common.devices import configure
from pat_jax.config.command_line import parse
from pat_jax.config.run import RunConfig
from pat_jax.run.loop import Run
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.scoring import open_scorer
from pat_jax.run.setup import build


class InTurns(Run):
    def iterate(self, step: int) -> None:
        jax.block_until_ready(self.learner.state)
        turns.wait()
        super().iterate(step)


turns = Turns(jax=jax.__version__)


def main() -> None:
    config = parse(sys.argv[1:], RunConfig, prog="pat_jax.train")
    with StopSignals() as signals:
        setup = build(config, configure(config.devices))
        with open_scorer(config, setup.task.rewards) as scorer:
            InTurns(setup, scorer, signals).run()


if __name__ == "__main__":
    main()
