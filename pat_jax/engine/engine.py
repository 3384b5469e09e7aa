"""The engine: one policy on a list of devices, from requests to completions.

Knows devices and programs. Knows nothing about text, rewards or how a plan is made; the loop is `rollout.py`.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pat_jax.common.devices import Device
from pat_jax.common.hosts.together import company
from pat_jax.common.memory import give_back
from pat_jax.common.stopwatch import Stopwatch
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.agreed_planner import AgreedPlanner
from pat_jax.engine.by_need import ByNeed
from pat_jax.engine.controller import Controller
from pat_jax.engine.device.decode.decode import DecodeFunctions
from pat_jax.engine.device.draft.draft_model import DraftModel, DraftSource
from pat_jax.engine.device.draft.draft_specs import DraftSpecs
from pat_jax.engine.device.programs.program_specs import (
    RESLICE_CHUNK_BYTES,
    ProgramSpecs,
    page_bytes,
    pages_per_group,
)
from pat_jax.engine.device.programs.weights import Weights
from pat_jax.engine.device_executor import DeviceExecutor
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.rollout import rollout
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.responses import Completion, Request, Responses
from pat_jax.layout.buckets import NO_DRAFTS, Buckets, Drafts
from pat_jax.layout.layout import Layout, factored_mesh, layout_chain
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Split
from pat_jax.programs.programs import ProgramTable

log = logging.getLogger(__name__)


class RolloutEngine:
    """Generates with one policy on a list of devices."""

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
        reslice_chunk_bytes: int = RESLICE_CHUNK_BYTES,
        kv_bytes: float = math.inf,
        runs_ahead: bool | None = None,
        drafts: Drafts = NO_DRAFTS,
        draft: DraftSource | None = None,
        drafting: str = "",
        by_need: bool = False,
    ):
        """
        Args:
          capacity: the most sequences that run at once; others wait.
          layouts: the layouts to prepare; every one that divides the model where not given.
          reslice_chunk_bytes: extra memory that a switch of the weights may take, all devices
            together.
          kv_bytes: what the KV cache may take of a device; it takes less where less is enough.
          runs_ahead: dispatch a burst before the results of the one before it are known, so that
            the devices do not wait for the host. A switch that no threshold predicted then comes
            one burst later. None: where the `Backend` does.
          drafts: those that bursts may verify, to be compiled as well.
          draft: the model that proposes them, where one does; `compile` loads it.
          drafting: which drafts are made and why, in words.
          by_need: `compile` compiles a few of the bursts' programs, rollouts the others as they
            need them.
        """
        self.policy, self.capacity, self.eos_ids = policy, capacity, tuple(eos_ids)
        self.checks, self.drafting = config.check_integrity, drafting
        self.dtype = dtype
        if layouts is None:
            layouts, dropped = layout_chain(factored_mesh(devices), policy.config)
            for reason in dropped:
                log.info("dropped: %s", reason)
        self.layouts = layouts
        self.mesh: Mesh = next(iter(layouts.values())).mesh
        buckets = Buckets.of(tuple(layouts), capacity, config)
        backend = next(iter(layouts.values())).backend
        self.runs_ahead = backend.runs_ahead if runs_ahead is None else runs_ahead
        functions = DecodeFunctions(
            policy,
            dtype,
            self.eos_ids,
            config.check_every,
            config.burst_steps,
            config.max_logprobs,
            drafts,
            draft and draft.policy,
        )
        self.specs = ProgramSpecs(
            functions,
            layouts,
            buckets,
            config.page_size,
            pages_per_group(
                layouts,
                buckets,
                config.page_size,
                unsplit=config.kv_pages,
                most=kv_bytes // page_bytes(policy.config, config.page_size, dtype),
            ),
            config.prefill_blocks,
            reslice_chunk_bytes,
            draft
            and DraftSpecs(
                draft.policy, dtype, buckets, drafts, config.page_size, config.prefill_blocks
            ),
            buckets.first(config.max_prompt_length, drafts) if by_need else None,
        )
        self.programs = ProgramTable()
        self.by_need = ByNeed(self.programs, buckets) if by_need else None
        self.specs.declare(self.programs)
        self._weights: Weights | None = None
        self._draft = draft
        self.draft_model: DraftModel | None = None

    def compile(
        self,
        progress: Callable[[int, int], None] | None = None,
        within: Collection[Split] | None = None,
    ) -> None:
        """Every program, or those of the layouts `within` and of the switches between them, of bursts as many
        as come first; the draft model, where there is one, is loaded before."""
        if self.draft_model is None and self._draft and self.specs.draft_specs:
            abstract = self.specs.draft_specs.params(next(iter(self.layouts.values())))
            shardings = jax.tree.map(lambda x: x.sharding, abstract)
            params = self._draft.load(shardings, self.dtype)
            self.draft_model = DraftModel(self.specs.draft_specs, params)
        threads, first = os.cpu_count() or 1, self.specs.is_first
        self.programs.compile_all(threads=threads, progress=progress, within=within, only=first)
        give_back()

    def to_compile(self, within: Collection[Split] | None = None) -> int:
        """How many programs `compile` would compile."""
        return sum(map(self.specs.is_first, self.programs.missing(within)))

    @property
    def text_room(self) -> int:
        """Tokens of others' texts that a row drafts from, at most; 0 where drafts are not copied."""
        return self.specs.text_room(self.specs.buckets.lengths[-1])

    @property
    def weights(self) -> Weights:
        assert self._weights is not None, "set_weights comes first"
        return self._weights

    @property
    def params(self) -> Params | None:
        """None before `set_weights`, and after `release_weights`."""
        return self._weights and self._weights.params

    @property
    def layout(self) -> Layout | None:
        """The layout of the weights."""
        return self._weights and self._weights.layout

    def set_weights(
        self, params: Params, layout: Layout, exit_head: np.ndarray | None = None
    ) -> None:
        """Takes over `params`, already on the shards of `layout`; the engine deletes them in time.

        A stream that has begun goes on with the weights that it began with.

        Args:
          exit_head: float[embed, embed], see `models/exit_head.py`; zeros where not given. It is used
            where the policy's first layers propose drafts.
        """
        self._weights = Weights(self.specs, self.programs, params, layout, exit_head)

    def release_weights(self) -> None:
        """Frees the rollout's copy of the weights: the update needs the memory."""
        if self._weights is not None:
            self._weights.delete()
        self._weights = None

    def reslice(self, target: Layout) -> tuple[int, int]:
        """Moves the weights to `target`; see `Weights.reslice`."""
        return self.weights.reslice(target)

    def rollout(
        self,
        requests: Sequence[Request],
        planner: Planner,
        expected: np.ndarray | None = None,
        earlier: EarlierResponses | None = None,
    ) -> tuple[list[Completion], RolloutReport]:
        """Generates every request to its end; see `stream`."""
        report = RolloutReport()
        stream = self.stream(requests, planner, report, expected=expected, earlier=earlier)
        done = dict(stream)
        return [done[i] for i in range(len(requests))], report

    def stream(
        self,
        requests: Sequence[Request],
        planner: Planner,
        report: RolloutReport,
        has_enough: Callable[[int, np.ndarray], bool] | None = None,
        expected: np.ndarray | None = None,
        earlier: EarlierResponses | None = None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yields each request's index and completion after the burst in which it ended.

        Those that find no row or pages wait for them.

        Args:
          report: filled in on the way; whole when the last completion has been taken.
          has_enough: told after each burst what every live request has said, int32[tokens]; where
            it says True the request ends there.
          expected: float[requests], tokens of the responses: of those that wait the longest begin
            first. In their order where not given.
          earlier: what drafts may be copied from as well; not to be changed before the stream has ended.
            On several processes the same on each.
        """
        # What a rollout waits for a compiler is no time of a burst or a switch.
        clock = Stopwatch(lambda: time.perf_counter() - self.programs.waited_s)
        report.expected, waited_s = expected, self.programs.waited_s
        if self.weights.layout.spans_processes:
            planner = AgreedPlanner(planner)
        with clock("schedule"):
            controller, responses = self._begin(requests, expected)
            tables = controller.scheduler.tables
            device = self.specs, self.programs, self.weights
            options = {"draft_model": self.draft_model, "checks": self.checks, "earlier": earlier}
            executor = DeviceExecutor(*device, responses, tables, clock, **options)
            if self.checks and earlier is not None:
                company().compare("earlier responses", earlier.checksum)
        enough = has_enough and (lambda i: has_enough(i, responses.response(i)))
        loop = rollout(controller, executor, planner, report, enough, log.info)
        with closing(loop):
            for ended in loop:
                for i in ended.tolist():
                    yield i, responses.completion(i, self.eos_ids)
        report.compile_s = self.programs.waited_s - waited_s

    def _begin(
        self,
        requests: Sequence[Request],
        expected: np.ndarray | None,
    ) -> tuple[Controller, Responses]:
        split, shapes = self.weights.layout.split, self.specs.shapes
        rows = shapes.buckets.rows[split][-1]
        responses = Responses.of(requests, num_groups=split.dp, rows_per_group=rows)
        controller = Controller(
            responses,
            shapes,
            split,
            runs_ahead=self.runs_ahead,
            checks=self.checks,
            expected=expected,
            by_need=self.by_need,
        )
        return controller, responses
