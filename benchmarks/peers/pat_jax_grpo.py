"""`pat_jax.train` with the options given, each iteration when it is its turn.

Run by `iteration_vs_peers.py` and `real_model.py`, with the Python that runs it.
"""

import sys

import jax
from turns import Turns

from pat_jax.common.devices import configure
from pat_jax.config.command_line import parse
from pat_jax.config.run import RunConfig
from pat_jax.run import loop
from pat_jax.run.opened import files_of, finish, opened
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.scoring import open_scorer
from pat_jax.run.start.setup import build

turns = Turns(jax=jax.__version__)
iterate = loop.Loop.iterate


def in_turns(self: loop.Loop, step: int) -> None:
    jax.block_until_ready(self.run.learner.state)
    turns.wait()
    iterate(self, step)


def main() -> None:
    config = parse(sys.argv[1:], RunConfig, prog="pat_jax.train")
    with StopSignals() as signals:
        setup = build(config, configure(config.devices))
        loop.Loop.iterate = in_turns
        with (
            open_scorer(setup.task.rewards, config.reward_limits) as scorer,
            files_of(setup, signals) as files,
            opened(setup, scorer, signals, files) as run,
        ):
            learned = loop.learn(run)
            jax.block_until_ready(run.learner.state)
            turns.end()
            finish(run, learned)


if __name__ == "__main__":
    main()
