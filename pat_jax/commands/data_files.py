"""The files that a run learns from and is evaluated on, in its options."""

from dataclasses import replace
from typing import TypeVar

from pat_jax.config.fine_tuning import FineTuning
from pat_jax.config.run import RunConfig
from pat_jax.run.start.given_rows import Paths

Run = TypeVar("Run", RunConfig, FineTuning)


def data_files(config: RunConfig | FineTuning) -> list[str]:
    return [*config.data.files, *config.eval.data]


def with_files(config: Run, paths: Paths) -> Run:
    """Returns the options with paths of files in place of the patterns and names of data."""
    data = replace(config.data, files=paths(config.data.files))
    return replace(config, data=data, eval=replace(config.eval, data=paths(config.eval.data)))
