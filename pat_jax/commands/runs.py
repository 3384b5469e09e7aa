"""The commands that make runs: `train`, `sft` and `reward_model`. Knows options, signals and rows.
Does not know what a run computes.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pat_jax.config.command_line import parse
from pat_jax.config.fine_tuning import FineTuning
from pat_jax.config.from_python import Config
from pat_jax.config.run import RunConfig
from pat_jax.run.files.folder import options_of_run
from pat_jax.run.process.in_process import in_program
from pat_jax.run.process.stop_signals import Stopped, StopSignals, leave
from pat_jax.run.start.given_rows import GivenRows, Paths

if TYPE_CHECKING:
    from pat_jax.run.results.saved_run import SavedRun

Run = TypeVar("Run", RunConfig, FineTuning)


@dataclass(frozen=True)
class RunCommand:
    """A command that makes runs, for a shell and for Python.

    Attributes:
      body: the module in `pat_jax.commands` whose `run` makes one.
      presets: the folder of presets; None offers none.
    """

    name: str
    config_class: type[RunConfig | FineTuning]
    body: str
    presets: Path | None = None

    def read(self, argv: Sequence[str], *, only: Collection[str] | None = None) -> Any:
        """Returns the options (see `command_line.parse`)."""
        prog = f"python -m pat_jax.{self.name}"
        return parse(argv, self.config_class, prog=prog, presets=self.presets, only=only)

    def main(self) -> None:
        try:
            with StopSignals() as signals:
                self._run(sys.argv[1:], signals, GivenRows())
        except Stopped as stop:
            leave(stop.exit_code)

    def __call__(self, config: Config, options: Mapping[str, Any]) -> "SavedRun":
        """Makes a run with options from Python (see `GivenRows.words`)."""
        from pat_jax.run.results.saved_run import SavedRun

        with in_program() as signals:
            rows = GivenRows()
            argv = rows.words(config, options, self.config_class, self.presets)
            folder = self._run(argv, signals, rows)
        return SavedRun(folder)

    def _run(self, argv: Sequence[str], signals: StopSignals, rows: GivenRows) -> str:
        config = options_of_run(argv, self.read)
        # JAX, once the options are right
        from pat_jax.run.process.distributed import meet

        body = import_module(f"pat_jax.commands.{self.body}")
        config = meet(config, signals)
        with rows.placed(config.run_dir, data_files(config)) as paths:
            body.run(with_files(config, paths), signals, rows)
        return config.run_dir


def data_files(config: RunConfig | FineTuning) -> list[str]:
    return [*config.data.files, *config.eval.data]


def with_files(config: Run, paths: Paths) -> Run:
    """Returns the options with paths of files in place of the patterns and names of data."""
    data = replace(config.data, files=paths(config.data.files))
    return replace(config, data=data, eval=replace(config.eval, data=paths(config.eval.data)))
