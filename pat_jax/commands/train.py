"""The command `train`: trains a policy by reinforcement learning."""

from pat_jax.common.devices import configure
from pat_jax.common.hosts.together import process_group
from pat_jax.config.run import RunConfig
from pat_jax.run.loop import learn
from pat_jax.run.opened import files_of, finish, opened
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.scoring import open_scorer
from pat_jax.run.start.given_rows import GivenRows
from pat_jax.run.start.setup import build


def run(config: RunConfig, signals: StopSignals, rows: GivenRows) -> None:
    """Makes a run. `rows` holds data that a Python program gave, whose files are in the options."""
    devices = configure(config.devices)
    if config.rollout.expert_width is None and "gpu" in {x.platform for x in devices}:
        from pat_jax.commands.expert_width import with_width  # imports prices as well

        config = with_width(config, devices)
    setup = build(config, devices)
    with (
        open_scorer(setup.task.rewards, config.reward_limits, setup.reward_models) as scorer,
        files_of(setup, signals) as files,
    ):
        process_group().agree("rows", rows.keep)
        with opened(setup, scorer, signals, files) as training:
            finish(training, learn(training))
