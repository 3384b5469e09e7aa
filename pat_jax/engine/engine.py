"""The engine: one policy on a list of devices, from requests to completions.

Knows devices and programs. Knows nothing about text, rewards or how a plan is made; the loop is
`rollout.py`.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pat_jax.common.devices import Device
from pat_jax.common.hosts.together import process_group
from pat_jax.common.memory import give_back
from pat_jax.common.stopwatch import Stopwatch
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.agreed_planner import AgreedPlanner
from pat_jax.engine.by_need import ByNeed
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.draft.drafters import NO_DRAFTER
from pat_jax.engine.device.draft.text_drafter import text_room
from pat_jax.engine.device.programs.program_specs import RESHARD_CHUNK_BYTES
from pat_jax.engine.device.programs.weights import Weights
from pat_jax.engine.device_executor import DeviceExecutor
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.rollout import rollout
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.responses import Completion, Request, Responses
from pat_jax.engine.sizing.pool_pages import buckets_of, pages_per_replica, specs_for
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Split
from pat_jax.programs.programs import ProgramTable

log = logging.getLogger(__name__)


class RolloutEngine:
    """Generates with one policy on a list of devices.

    Args:
      capacity: the most sequences that run at once; others wait.
      layouts: the layouts to prepare; None prepares every layout that divides the model.
      reshard_bytes: the most extra memory that resharding takes, on all devices together.
      kv_bytes: the most memory of a device for the KV cache, which takes less if less is enough.
      drafter: proposes the drafts that bursts may verify; `compile` loads its draft model.
      drafting: a sentence about which drafts are used and why.
      by_need: `compile` compiles a few of the decode programs, and rollouts compile the others
        when they need them.
    """

    def __init__(
        self,
        policy: Policy,
        devices: Sequence[Device],
        config: RolloutConfig,
        *,
        capacity: int,
        eos_ids: Sequence[int],
        dtype: jnp.dtype = jnp.float32,
        layouts: dict[Split, Layout] | None = None,
        reshard_bytes: int = RESHARD_CHUNK_BYTES,
        kv_bytes: float = math.inf,
        drafter: Drafter = NO_DRAFTER,
        drafting: str = "",
        by_need: bool = False,
    ):
        self.policy = policy
        self.capacity = capacity
        self.eos_ids = tuple(eos_ids)
        self.checks = config.check_integrity
        self.drafting = drafting
        self.dtype = dtype
        layouts = _all_layouts(policy, devices) if layouts is None else layouts
        self.layouts = layouts
        some = next(iter(layouts.values()))
        self.mesh: Mesh = some.mesh
        self.runs_ahead = some.backend.runs_ahead
        buckets = buckets_of(layouts, capacity, config, policy.config)
        pages = pages_per_replica(kv_bytes, config, policy.config, layouts, buckets, dtype)
        first = buckets.first(config.max_prompt_length, drafter.drafts) if by_need else None
        self.specs = specs_for(
            config, policy, drafter, dtype, eos_ids, layouts, buckets, pages, reshard_bytes, first
        )
        self.programs = ProgramTable()
        self.by_need = ByNeed(self.programs, buckets) if by_need else None
        self.specs.declare(self.programs)
        self._weights: Weights | None = None
        self._draft_model: Params | None = None

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles the programs, after loading the draft model if there is one.

        With `by_need`, only the first few decode programs are compiled.
        """
        self.load_draft_model()
        threads = os.cpu_count() or 1
        first = self.specs.is_first
        self.programs.compile_all(threads=threads, progress=progress, only=first)
        give_back()

    def load_draft_model(self) -> None:
        """Loads the draft model, if there is one and it is not loaded yet."""
        if self._draft_model is None:
            some = next(iter(self.layouts.values()))
            self._draft_model = self.specs.drafter.load(some, self.specs.draft_shapes)

    def to_compile(self) -> int:
        """Returns how many programs `compile` would compile."""
        return sum(map(self.specs.is_first, self.programs.missing()))

    @property
    def text_room(self) -> int:
        """The most tokens of other responses from which a row's drafts are copied; may be 0."""
        return text_room(self.specs.drafts, self.specs.buckets.lengths[-1], self.specs.draft_shapes)

    @property
    def draft_params(self) -> Any:
        """The drafter's weights: those of a draft model, an early-exit head, or None."""
        return self.weights.exit_head if self._draft_model is None else self._draft_model

    @property
    def weights(self) -> Weights:
        assert self._weights is not None, "set_weights comes first"
        return self._weights

    @property
    def params(self) -> Params | None:
        """The weights; None before `set_weights` and after `release_weights`."""
        return self._weights and self._weights.params

    @property
    def layout(self) -> Layout | None:
        """The layout of the weights; None if there are none."""
        return self._weights and self._weights.layout

    def set_weights(
        self, params: Params, layout: Layout, exit_head: np.ndarray | None = None
    ) -> None:
        """Takes over `params`, already sharded for `layout`; the engine deletes them.

        A running stream continues with the weights that it began with.

        Args:
          exit_head: float[embed, embed], see `layers.exit_hidden`; None stands for zeros. Only
            early exit uses it: drafts that the policy's first layers propose.
        """
        self._weights = Weights(self.specs, self.programs, params, layout, exit_head)

    def release_weights(self) -> None:
        """Frees the rollout's copy of the weights, whose memory the update needs."""
        if self._weights is not None:
            self._weights.delete()
        self._weights = None

    def rollout(
        self,
        requests: Sequence[Request],
        planner: Planner,
        expected: np.ndarray | None = None,
        earlier: EarlierResponses | None = None,
    ) -> tuple[list[Completion], RolloutReport]:
        """Generates all responses; returns completions in order, and a report. See `stream`."""
        report = RolloutReport()
        stream = self.stream(requests, planner, report, expected=expected, earlier=earlier)
        done = dict(stream)
        return [done[i] for i in range(len(requests))], report

    def stream(
        self,
        requests: Sequence[Request],
        planner: Planner,
        report: RolloutReport,
        should_stop: Callable[[int, np.ndarray], bool] | None = None,
        expected: np.ndarray | None = None,
        earlier: EarlierResponses | None = None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yields each request's index and completion after the burst in which it ended.

        Requests that find no free row or pages wait.

        Args:
          report: filled while the stream runs; complete after the last completion.
          should_stop: called after each burst with the index and tokens, int32[tokens], of every
            running request; True ends the request.
          expected: float[requests], the predicted length of each response in tokens: the longest
            begin first. None keeps the order of the requests.
          earlier: responses that drafts may also be copied from. Do not change it before the stream
            ends. It must be the same in all processes.
        """
        # Time spent waiting for a compiler does not count as time of a burst or a switch.
        clock = Stopwatch(lambda: time.perf_counter() - self.programs.waited_s)
        before_s = self.programs.waited_s
        if self.weights.layout.spans_processes:
            planner = AgreedPlanner(planner)
        with clock("schedule"):
            responses, scheduler, executor = self._begin(requests, expected, earlier, clock)
        enough = should_stop and (lambda i: should_stop(i, responses.response(i)))
        loop = rollout(scheduler, executor, planner, report, enough, log.info)
        with closing(loop):
            for ended in loop:
                for i in ended.tolist():
                    yield i, responses.completion(i, self.eos_ids)
        report.compile_s = self.programs.waited_s - before_s

    def _begin(
        self,
        requests: Sequence[Request],
        expected: np.ndarray | None,
        earlier: EarlierResponses | None,
        clock: Stopwatch,
    ) -> tuple[Responses, Scheduler, DeviceExecutor]:
        if self.checks and earlier is not None:
            process_group().compare("earlier responses", earlier.checksum)
        split = self.weights.layout.split
        shapes = self.specs.shapes
        rows = shapes.buckets.rows[split][-1]
        responses = Responses.of(
            requests,
            num_replicas=split.dp,
            rows_per_replica=rows,
            routes_shape=self.policy.config.routes_shape,
        )
        scheduler = Scheduler(
            responses,
            shapes,
            split,
            runs_ahead=self.runs_ahead,
            checks=self.checks,
            expected=expected,
            by_need=self.by_need,
        )
        executor = DeviceExecutor(
            self.specs,
            self.programs,
            self.weights,
            responses,
            scheduler.cache_manager.tables,
            clock,
            draft_params=self.draft_params,
            checks=self.checks,
            earlier=earlier,
        )
        return responses, scheduler, executor


def _all_layouts(policy: Policy, devices: Sequence[Device]) -> dict[Split, Layout]:
    layouts, dropped = layout_chain(factored_mesh(devices), policy.config)
    for reason in dropped:
        log.info("dropped: %s", reason)
    return layouts
