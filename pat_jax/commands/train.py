"""The command `train`: trains a policy by reinforcement learning."""

from dataclasses import replace
from typing import Any

from pat_jax.common.devices import configure
from pat_jax.common.errors import UserError, shown
from pat_jax.common.hosts.together import process_group
from pat_jax.config.run import RunConfig
from pat_jax.rl.algorithm.losses import Loss
from pat_jax.run.loop import learn
from pat_jax.run.opened import files_of, finish, opened
from pat_jax.run.process.distributed import meet
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.scoring import open_scorer
from pat_jax.run.start.given_rows import GivenRows, Paths
from pat_jax.run.start.sent_code import send_loss, send_reward
from pat_jax.run.start.setup import build


def run(config: RunConfig, signals: StopSignals, rows: GivenRows) -> str:
    """Trains, and returns the run's folder. `rows` holds data that a Python program gave instead of
    files."""
    config = meet(config, signals)
    with rows.placed(config.run_dir, data_files(config)) as paths:
        config = with_files(config, paths)
        devices = configure(config.devices)
        if config.rollout.expert_width is None and "gpu" in {x.platform for x in devices}:
            from pat_jax.commands.expert_width import with_width  # imports prices as well

            config = with_width(config, devices)
        setup = build(config, devices)
        with (
            open_scorer(setup.task.rewards, config.reward_limits, setup.reward_models) as scorer,
            files_of(setup, signals) as files,
        ):
            process_group().agree("rows", lambda: rows.keep(config.run_dir, data_files(config)))
            with opened(setup, scorer, signals, files) as training:
                finish(training, learn(training))
    return config.run_dir


def data_files(config: RunConfig) -> list[str]:
    return [*config.data.files, *config.eval.data]


def with_files(config: RunConfig, paths: Paths) -> RunConfig:
    """Returns the options with paths of files in place of the patterns and names of problems."""
    data = replace(config.data, files=paths(config.data.files))
    return replace(config, data=data, eval=replace(config.eval, data=paths(config.eval.data)))


def rewards_of(reward: object) -> list[str]:
    """Returns the value of `--reward`. Functions are written to files, which the processes that
    score read. Raises UserError if one is neither a function nor a text, or cannot be written."""
    found: list[Any] = list(reward) if isinstance(reward, list | tuple) else [reward]
    if not found or not all(isinstance(each, str) or callable(each) for each in found):
        raise UserError(
            f"reward is {shown(reward)}: expected a function, what --reward names, or a list of them; give one."
        )
    return [send_reward(each) if callable(each) else each for each in found]


def loss_of(loss: object) -> str:
    """Returns the value of `--algorithm.loss`. A loss, or its class, is written to a file, which a
    resumed run reads. Raises UserError if `loss` is neither a loss, its class nor a text, or if it
    cannot be written."""
    if isinstance(loss, str):
        return loss
    if isinstance(loss, Loss) or (isinstance(loss, type) and issubclass(loss, Loss)):
        return send_loss(loss)
    raise UserError(
        f"loss is {shown(loss)}: expected an object of a class derived from pat_jax.rl.algorithm.losses.Loss, "
        "which names the columns that it reads and the metrics that it gives beside computing them; "
        "write a function as the method `values` of such a class, as examples/loss.py does."
    )
