"""Compiles layouts in the background of a run, and measures them between two iterations.

Before the first iteration, only two kinds of layouts are compiled: the one in which rollouts start,
and those that pay by the profile (`planner/compilation.py`). No iteration waits for the others.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Self

from pat_jax.common.hosts.together import process_group
from pat_jax.config.run import RunConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.compilation import worth_compiling
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import Split
from pat_jax.programs.programs import BackgroundCompiler
from pat_jax.run.generation import full_load
from pat_jax.run.setup import Setup
from pat_jax.run.start.prepare import cost_planner

log = logging.getLogger(__name__)


def first_layouts(config: RunConfig, setup: Setup) -> tuple[Split, ...]:
    """Returns the layouts to compile before the first iteration: all, unless --rollout.compile is
    lazy. With a profile, a lazy run compiles the layout in which a rollout starts and those worth
    compiling; without one, it compiles the layout with the least TP."""
    engine, profile, rollout = setup.engine, setup.profile, config.rollout
    splits = tuple(engine.layouts)
    if rollout.compile != "lazy" or setup.scripted or len(splits) == 1:
        return splits
    if profile is None:
        return splits[:1]
    lengths = LengthModel.empty(rollout.max_completion_length)
    planner = cost_planner(config, setup, _usable(profile.latency, engine), lengths)
    planner.splits = tuple(split for split in splits if split in planner.latency.decode)
    if not planner.splits:
        return splits[:1]
    load = full_load(rollout, engine.capacity)
    planner.splits = (planner.start(load),)
    compile_s = _compile_s(engine, profile.compile_s.values(), planner.splits)
    return *planner.splits, *sorted(worth_compiling(planner, load, compile_s, config.steps))


class LazyLayouts:
    """Compiles layouts in the background if they are predicted to save more time than their
    compilation takes, and adds them to the planner's layouts."""

    def __init__(
        self, setup: Setup, planner: CostModelPlanner, warmup: Warmup, ready: Sequence[Split]
    ):
        """`planner` plans with the layouts in `ready`, which `warmup` has measured; others are
        added later."""
        self.engine, self.planner, self.warmup = setup.engine, planner, warmup
        self.ready = list(ready)
        self.load = full_load(setup.config.rollout, self.engine.capacity)
        self.compiler = BackgroundCompiler(self.engine.programs, self.engine.specs.is_first)
        self.requested: list[Split] = []
        self._plan_with_ready()

    def end_rollout(self, iterations_left: int) -> None:
        """Starts compiling the layouts that are worth it by the lengths seen so far."""
        compile_s = _compile_s(self.engine, (), self.ready)
        if self.requested or not compile_s:
            return
        asked = self.planner, self.load, compile_s, iterations_left
        for split in process_group().agree("wanted layouts", lambda: worth_compiling(*asked)):
            told = "wanted: %s, %.1f s to compile, %d iterations left"
            log.info(told, split, compile_s[split], iterations_left)
            self.compiler.start(split, [*self.ready, *self.requested])
            self.requested.append(split)

    def due(self) -> list[Split]:
        """Returns the layouts that every process has compiled in the background."""
        return sorted(set.intersection(*process_group().gather("compiled", self.compiler.finished)))

    def bring_in(self, due: Sequence[Split], load_weights: Callable[[Layout], Params]) -> list[str]:
        """Warms up and measures the layouts `due`, while the engine holds no weights. From then on
        plans may use them. Returns a line about each."""
        lines = []
        for split in due:
            seconds = self.compiler.take(split)
            measured = self.warmup.measure(load_weights, [split], beside=self.ready)
            self.ready.append(split)
            self.requested.remove(split)
            correction = self.planner.latency.correction
            latency = _usable(measured, self.engine)
            self.planner.latency = replace(latency, correction=correction)
            self._plan_with_ready()
            lines.append(f"{split} compiled in the background in {seconds:.1f} s, now in use")
            log.info("%s", lines[-1])
        return lines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.compiler.close()

    def _plan_with_ready(self) -> None:
        self.planner.splits = tuple(split for split in self.engine.layouts if split in self.ready)


def _usable(latency: LatencyModel, engine: RolloutEngine) -> LatencyModel:
    rows, lengths = engine.specs.buckets.rows, engine.specs.buckets.lengths
    return latency.of_drafts_from(engine.specs.drafter.come_from).on(rows, lengths)


def _compile_s(
    engine: RolloutEngine, profiled: Collection[float], there: Sequence[Split]
) -> dict[Split, float]:
    """Returns the predicted seconds to compile each layout not in `there`, including its switches
    to those. The mean of `profiled` is used until this process has compiled a program."""
    seen = engine.programs.compile_seconds.values() or profiled
    each_s = sum(seen) / max(1, len(seen))
    missing = {}
    for split in engine.layouts:
        if split not in there:
            keys = filter(engine.specs.is_first, engine.programs.missing({split, *there}))
            missing[split] = each_s * sum(split in key.splits for key in keys)
    return missing
