"""Layouts that come into a run while it goes on: compiled beside it, measured between two iterations.

Before the first iteration only the layout in which rollouts start is compiled, and what a profile
says is wanted at once. Nothing is compiled while an iteration waits for it.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self

from pat_jax.common.hosts.together import company
from pat_jax.config.run import RunConfig
from pat_jax.engine.device.background import BackgroundCompiler
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.layout.layout import Layout
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.models.policy import Params
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.compilation import CompileTimes, Uncompiled, optimistic
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import Split
from pat_jax.run.generation import full_load
from pat_jax.run.prepare import cost_planner
from pat_jax.run.setup import Setup

log = logging.getLogger(__name__)


def first_layouts(config: RunConfig, setup: Setup) -> tuple[Split, ...]:
    """The layouts to compile before the first iteration.

    With a profile: where a rollout starts by it, and what would pay from the first rollout on.
    Without: the lowest TP that has room, because nothing is known of the others.
    """
    engine, profile, rollout = setup.engine, setup.profile, config.rollout
    splits = tuple(engine.layouts)
    if rollout.compile != "lazy" or setup.scripted or len(splits) == 1:
        return splits
    if profile is None:
        return splits[:1]
    lengths = LengthModel.empty(rollout.max_completion_length)
    planner = cost_planner(config, setup, _filled(profile.latency, engine), lengths)
    load = full_load(rollout, engine.capacity)
    start = planner.start(load)
    compile_s = _compile_s(engine, profile.compile_s, ready=(start,))
    planner.uncompiled = Uncompiled(compile_s, config.steps)
    planner.start(load)
    return start, *sorted(planner.uncompiled.wanted)


class LazyLayouts:
    """Brings in what the planner wants and could not have."""

    def __init__(
        self,
        setup: Setup,
        planner: CostModelPlanner,
        warmup: Warmup,
        ready: Sequence[Split],
        iterations_left: int,
    ):
        """
        Args:
          planner: told what it may lead to; its latency model is completed.
          warmup: what has measured the layouts that are `ready`.
        """
        self.engine, self.planner, self.warmup = setup.engine, planner, warmup
        self.ready = list(ready)
        self.profiled = setup.profile.compile_s if setup.profile else {}
        self.compiler = BackgroundCompiler(self.engine.programs, self.engine.specs.is_first)
        self.requested: list[Split] = []
        self.uncompiled = Uncompiled(self._missing_s(), iterations_left)
        planner.uncompiled = self.uncompiled
        planner.latency = _filled(planner.latency, self.engine)

    def end_rollout(self, iterations_left: int) -> None:
        """Learns from a rollout what is wanted, and has it compiled if iterations are left."""
        self.uncompiled.end_rollout(iterations_left)
        self.uncompiled.compile_s.update(self._missing_s())
        if not iterations_left:
            return
        wanted = company().agree("wanted layouts", lambda: self.uncompiled.wanted)
        for split in sorted(wanted - set(self.requested)):
            log.info(
                "wanted: %s, %.1f s to compile, %d iterations left",
                split,
                self.uncompiled.compile_s[split],
                iterations_left,
            )
            self.compiler.start(split, [*self.ready, *self.requested])
            self.requested.append(split)

    def due(self) -> list[Split]:
        """What has been compiled meanwhile, by every process."""
        return sorted(set.intersection(*company().gather("compiled", self.compiler.finished)))

    def bring_in(self, due: Sequence[Split], load_weights: Callable[[Layout], Params]) -> list[str]:
        """Warms up and measures layouts that are `due`; the engine holds no weights meanwhile.

        Returns:
          A line for each layout that plans may lead to from now on.
        """
        lines = []
        for split in due:
            seconds = self.compiler.take(split)
            measured = self.warmup.measure(load_weights, [split], beside=self.ready)
            self.ready.append(split)
            self.requested.remove(split)
            self.uncompiled.compiled(split)
            latency = _filled(measured, self.engine)
            seen = self.planner.latency
            self.planner.latency = replace(latency, correction=seen.correction)
            lines.append(f"{split} compiled in the background in {seconds:.1f} s, now in use")
            log.info("%s", lines[-1])
        return lines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.compiler.close()

    def _missing_s(self) -> dict[Split, float]:
        return _compile_s(self.engine, self.profiled, self.ready)


def _filled(latency: LatencyModel, engine: RolloutEngine) -> LatencyModel:
    rows, lengths = engine.specs.buckets.rows, engine.specs.buckets.lengths
    known = latency.of_drafts_from(engine.specs.drafts_from)
    return optimistic(known.on(rows, lengths), rows, lengths)


def _compile_s(
    engine: RolloutEngine, profiled: Mapping[str, float], ready: Sequence[Split]
) -> dict[Split, float]:
    """Seconds to compile each layout that is not `ready`, its switches to those that are included."""
    seen = defaultdict(list)
    for key, seconds in engine.programs.compile_seconds.items():
        seen[(key.name, key.split)].append(seconds)
    times = CompileTimes(profiled, seen)
    missing = {}
    for split in engine.layouts:
        if split not in ready:
            keys = filter(engine.specs.is_first, engine.programs.missing({split, *ready}))
            kinds = Counter((key.name, key.split) for key in keys if split in key.splits)
            missing[split] = times.estimate(kinds)
    return missing
