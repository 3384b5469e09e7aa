"""The command `train`: trains a policy by reinforcement learning."""

from typing import Any

from pat_jax.common.devices import configure
from pat_jax.common.errors import UserError, shown
from pat_jax.common.hosts.together import process_group
from pat_jax.config.run import RunConfig
from pat_jax.run.loop import Run
from pat_jax.run.process.distributed import meet
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.results.serialized_rewards import REWARDS, ship
from pat_jax.run.scoring import open_scorer
from pat_jax.run.setup import build
from pat_jax.run.start.given_rows import GivenRows


def run(config: RunConfig, signals: StopSignals, rows: GivenRows) -> str:
    """Trains, and returns the run's folder. `rows` are rows that a program gave instead of data
    files."""
    config = meet(config, signals)
    with rows.placed(config) as config:
        devices = configure(config.devices)
        if config.rollout.expert_width is None and "gpu" in {x.platform for x in devices}:
            from pat_jax.commands.expert_width import with_width  # imports prices as well

            config = with_width(config, devices)
        setup = build(config, devices)
        with open_scorer(config, setup.task.rewards, setup.reward_models) as scorer:
            training = Run(setup, scorer, signals)
            try:
                process_group().agree("rows", lambda: rows.keep(config))
                training.run()
                if config.show_switch:
                    from pat_jax.commands.show_switch import show_switch  # imports replays as well

                    show_switch(training)
            finally:
                training.open.release()
    return config.run_dir


def rewards_of(reward: object) -> list[str]:
    """Returns the value of `--reward`. Functions are written to files, for the processes that
    score. Raises UserError if one is neither a function nor a text, or cannot be written."""
    found: list[Any] = list(reward) if isinstance(reward, list | tuple) else [reward]
    if not found or not all(isinstance(each, str) or callable(each) for each in found):
        raise UserError(
            f"reward is {shown(reward)}: expected a function, what --reward names, or a list of them; give one."
        )
    return [ship(each, REWARDS) if callable(each) else each for each in found]
