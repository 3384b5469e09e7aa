"""Connects the processes of a run: all have the same options, and a signal to one stops all. A run
of one process connects to nothing.
"""

from dataclasses import asdict, replace
from typing import TypeVar

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.join import join
from pat_jax.config.any_run import AnyRun
from pat_jax.run.files.folder import check_run_dir, differences
from pat_jax.run.logging.trackers.asked_for import check_trackers
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.roles.export import check_export_dirs

Options = TypeVar("Options", bound=AnyRun)

OWN = ("run_dir", "distributed.process_id", "distributed.coordinator")  # may differ by process


def meet(config: Options, signals: StopSignals) -> Options:
    """Connects the processes; call it before asking JAX for devices. Returns the options with the
    run folder of the first process. Raises UserError if the processes do not find each other, were
    started with different options, or cannot write to the folders given."""
    us = join(config.distributed)
    signals.stop_all(us)
    first = us.agree("options", lambda: config)
    changed = differences(asdict(first), asdict(config))
    for sentence in us.gather("other options", _complaint(us.index, changed)):
        if sentence:
            raise UserError(sentence)
    config = replace(config, run_dir=first.run_dir)
    us.agree("where to write", lambda: _check_places(config))
    return config


def _complaint(index: int, changed: dict[str, tuple[object, object]]) -> str:
    other = [f"--{name} {b}, not {a}" for name, (a, b) in changed.items() if name not in OWN]
    if not other:
        return ""
    return (
        f"process {index} was started with other options than process 0 ({', '.join(other)}): start all "
        "with the same ones."
    )


def _check_places(config: AnyRun) -> None:
    check_run_dir(config.run_dir, is_resumed=config.resume)
    check_trackers(config.trackers)
    check_export_dirs(config.export_dirs, config.run_dir, resume=config.resume)
