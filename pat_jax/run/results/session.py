"""Opens a session that only generates: compiles and warms up its engine, and loads the weights.

Knows options and engines. Does not know what is asked of the session.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pat_jax.common.bars import counting, note
from pat_jax.common.devices import Device
from pat_jax.config.engine import EngineChoice
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.task import TaskChoice
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.session import Session
from pat_jax.engine.sizing.memory import engine_memory
from pat_jax.layout.layout import Layout
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.latency.profile import Profile, Subject
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.run.roles.saved_policy import SavedPolicy
from pat_jax.run.roles.weights import Load, weights_of_model, weights_of_run
from pat_jax.run.start.engine_setup import build_engine
from pat_jax.run.start.exit_head_state import saved_head
from pat_jax.run.start.prepare import cost_planner, warm_up
from pat_jax.run.start.profiles import find_profile, profile_subject

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionSetup:
    """The parts of a session, before anything is compiled."""

    rollout: RolloutConfig
    engine: RolloutEngine
    subject: Subject  # the model and devices of the profile
    asked_profile: str  # the value of --profile
    profile: Profile | None  # measured before this start, if any was
    load: Load  # loads the weights
    exit_head: np.ndarray | None = None  # learned by a run; see `RolloutEngine.set_weights`
    headless: str = ""  # why early exit drafts without a learned head, if it does
    resident: Sequence[Any] = ()  # shapes with shardings of other arrays on the devices

    @classmethod
    def of(
        cls,
        asked: EngineChoice,
        task: TaskChoice,
        model: ModelConfig,
        devices: Sequence[Device],
        saved: SavedPolicy | None,
        *,
        profile: str,
        adapter: str = "",
        resident: Sequence[Any] = (),
    ) -> "SessionSetup":
        """Builds the parts of a session. The policy is that of `saved` or, if it is None, that of
        --model with the adapter merged. Raises UserError if anything in the options or their files
        cannot work.

        Args:
          profile: the value of --profile.
          resident: shapes with shardings of other arrays on the devices.
        """
        engine = build_engine(asked, task, model, devices, resident)
        head = None
        headless = ""
        if saved is None:
            load = weights_of_model(asked.model, model, adapter, task.seed)
        else:
            layout = next(iter(engine.layouts.values()))
            load = weights_of_run(asked.model, saved, Policy.from_config(model), layout, task.seed)
            head, headless = saved_head(saved, engine)
        subject = profile_subject(model, asked.rollout, asked.dtype, devices)
        return cls(
            rollout=asked.rollout,
            engine=engine,
            subject=subject,
            asked_profile=profile,
            profile=find_profile(profile, subject),
            load=load,
            exit_head=head,
            headless=headless,
            resident=resident,
        )

    def open(self, *, max_length: int | None = None) -> Session:
        """Compiles, loads the weights, and returns the session. `max_length` is that of
        `Session`."""
        engine = self.engine
        log.info("%s", engine.drafting)
        if engine.by_need and _is_alone(engine):
            engine.load_draft_model()
        else:
            _compile(engine)
        planner = self._planner()
        first = next(iter(engine.layouts.values()))
        engine.set_weights(self._weights_in(first), first, self.exit_head)
        return Session(engine, planner, max_length=max_length)

    def _weights_in(self, layout: Layout) -> Params:
        return self.load(self.engine.dtype, self.engine.policy, layout)

    def _planner(self) -> Planner:
        engine = self.engine
        if _is_alone(engine):
            return FixedLayout(next(iter(engine.layouts)))
        memory = engine_memory(engine.specs, self.rollout, self.resident)
        started = time.perf_counter()
        latency = warm_up(self.asked_profile, engine, self.subject, self.profile, self._weights_in)
        names = ", ".join(map(str, engine.layouts))
        note(f"measured {names} in {time.perf_counter() - started:.1f} s")
        lengths = LengthModel.empty(engine.specs.buckets.lengths[-1])
        return cost_planner(engine, latency, lengths, memory)


def _is_alone(engine: RolloutEngine) -> bool:
    """Returns whether there is nothing to plan: one layout with one replica, and no drafts."""
    first, *others = engine.layouts
    return first.dp == 1 and not others and not engine.specs.drafts.num_draft_tokens


def _compile(engine: RolloutEngine) -> None:
    started = time.perf_counter()
    if count := engine.to_compile():
        note(f"compiling {count} programs")
    with counting("compiling") as show:
        engine.compile(show)
    if count:
        note(f"compiled in {time.perf_counter() - started:.1f} s")
