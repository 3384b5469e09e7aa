"""Runs that learn from files, in the program of the tests."""

import os
import signal
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import pytest
from compilations import counted_compilations

import pat_jax.sft as sft
from pat_jax.run.files.folder import options_of_run
from pat_jax.run.process.stop_signals import Stopped, StopSignals
from pat_jax.run.sft.loop import Position, SftRun
from pat_jax.run.sft.setup import SftSetup, build
from pat_jax.training.trainable_params import Leaves


class Whole(NamedTuple):
    """A run to the end."""

    folder: Path
    setup: SftSetup
    params: Leaves
    begun: list[str]  # compilations before the first step, besides its programs
    compiled: list[str]  # compilations during its steps


def made(*options: str, command: ModuleType = sft) -> SftSetup:
    """What a command's run is made of."""
    config = options_of_run(options, command.read)
    return build(config, jax.devices()[: config.devices])


def whole_run(setup: SftSetup) -> Position:
    """Runs the command's loop; returns where it ended."""
    run = SftRun(setup, StopSignals())
    ended = run.run()
    run.files.release()
    return ended


def to_the_end(setup: SftSetup) -> Whole:
    run = SftRun(setup, StopSignals())
    run.compile()
    # Orbax compiles slices of what several devices have alike; the last step is saved at the end too.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.files, "save", lambda *_: None)
        with counted_compilations() as begun:
            at_begin = run.begin()
        with counted_compilations() as compiled:
            ended = run.learn(at_begin)
    params = jax.device_get(ended.state.params)
    run.finish(at_begin, ended, 0.0)
    run.files.release()
    return Whole(Path(setup.config.run_dir), setup, params, begun, compiled)


def stop_at(step: int, setup: SftSetup) -> None:
    """Begins a run to which a signal comes at the beginning of a step."""
    draw, steps = setup.examples.draw, count()

    def draw_and_stop(position: int, size: int) -> list[Any]:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw(position, size)

    with pytest.raises(Stopped), StopSignals() as signals, pytest.MonkeyPatch.context() as patch:
        run = SftRun(setup, signals)
        patch.setattr(setup.examples, "draw", draw_and_stop)
        run.run()
    run.files.release()
