"""The rollout: from requests to responses, switching layouts on the way when the planner says so.

Knows devices, programs and the loop. Knows nothing about text, rewards or how a plan is made.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Generator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pat_jax.common.devices import Device
from pat_jax.common.stopwatch import Stopwatch
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device import reslice as switch
from pat_jax.engine.device.decode import DecodeFunctions
from pat_jax.engine.device.program_specs import (
    RESLICE_CHUNK_BYTES,
    ProgramSpecs,
    page_bytes,
    pages_per_group,
)
from pat_jax.engine.device.programs import Key, ProgramTable
from pat_jax.engine.flight import Flight
from pat_jax.engine.layout.buckets import Buckets
from pat_jax.engine.layout.layout import Layout, factored_mesh, layout_chain
from pat_jax.engine.report import RolloutReport, describe_switch
from pat_jax.engine.sequences.sequence_table import Completion, Request
from pat_jax.engine.sequences.state import Burst
from pat_jax.engine.trace import Switch
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Balance, Plan, Ran, Split, way

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
    ):
        """
        Args:
          capacity: the most sequences that run at once; others wait.
          layouts: the layouts to prepare; every one that divides the model where not given.
          reslice_chunk_bytes: extra memory that a switch of the weights may take, all devices together.
          kv_bytes: what the KV cache may take of a device; it takes less where less is enough.
          runs_ahead: dispatch a burst before the results of the one before it are known, so that
            the devices do not wait for the host. A switch that no threshold foresaw then comes one
            burst later. None: except on CPU, where the host's work takes the devices' own cores.
        """
        self.policy, self.capacity, self.eos_ids = policy, capacity, tuple(eos_ids)
        self.dtype = dtype
        self.mesh: Mesh = factored_mesh(devices)
        if layouts is None:
            layouts, dropped = layout_chain(self.mesh, policy.config)
            for reason in dropped:
                log.info("dropped: %s", reason)
        self.layouts = layouts
        buckets = Buckets.build(
            tuple(layouts),
            capacity=capacity,
            min_rows=config.min_rows,
            min_length=config.min_length,
            max_length=config.max_prompt_length + config.max_completion_length,
        )
        is_on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        self.runs_ahead = not is_on_cpu if runs_ahead is None else runs_ahead
        functions = DecodeFunctions(
            policy,
            dtype,
            self.eos_ids,
            config.check_every,
            config.burst_steps,
            config.max_logprobs,
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
            # XLA:CPU compiles an all-gather to slow loops (seen: six times the processor time of
            # copies on the host). Devices with memories and links of their own run the program.
            gathers_on_host=is_on_cpu,
        )
        self.programs = ProgramTable()
        self.specs.declare(self.programs)
        self.params: Params | None = None
        self.layout: Layout | None = None

    def compile(
        self,
        progress: Callable[[int, int], None] | None = None,
        within: Collection[Split] | None = None,
    ) -> None:
        """Every program, or those of the layouts `within` and of the switches between them."""
        self.programs.compile_all(threads=os.cpu_count() or 1, progress=progress, within=within)

    def set_weights(self, params: Params, layout: Layout) -> None:
        """Takes over `params`, already on the shards of `layout`; the engine deletes them in time."""
        self.params, self.layout = params, layout

    @property
    def _weights(self) -> tuple[Params, Layout]:
        assert self.params is not None and self.layout is not None, "set_weights comes first"
        return self.params, self.layout

    def release_weights(self) -> None:
        """Frees the rollout's copy of the weights: the update needs the memory."""
        for leaf in jax.tree.leaves(self.params):
            leaf.delete()
        self.params = self.layout = None

    def reslice(self, target: Layout) -> tuple[int, int]:
        """Moves the weights to `target`.

        Returns:
          The bytes that went from device to device, and the most that one device held besides its
          old shards.
        """
        params, layout = self._weights
        plan = self.specs.reslice(layout, target)
        if plan.is_on_host:
            shardings = target.param_shardings(self.policy)
            self.params = switch.reslice_on_host(params, shardings, [leaf for (leaf,) in plan.runs])
        else:
            programs = [
                self.programs[Key("reslice", layout.split, target=target.split, part=part)]
                for part in range(len(plan.runs))
            ]
            self.params = switch.reslice(params, plan.runs, programs)
        self.layout = target
        return plan.sent_bytes, plan.extra_bytes

    def rollout(
        self,
        requests: Sequence[Request],
        planner: Planner,
        expected: np.ndarray | None = None,
    ) -> tuple[list[Completion], RolloutReport]:
        """Generates every request to its end; see `stream`."""
        report = RolloutReport()
        done = dict(self.stream(requests, planner, report, expected=expected))
        return [done[i] for i in range(len(requests))], report

    def stream(
        self,
        requests: Sequence[Request],
        planner: Planner,
        report: RolloutReport,
        has_enough: Callable[[int, np.ndarray], bool] | None = None,
        expected: np.ndarray | None = None,
    ) -> Generator[tuple[int, Completion], None, None]:
        """Yields each request's index and completion after the burst in which it ended.

        Those that find no row or pages wait for them.

        Args:
          report: filled in on the way; whole when the last completion has been taken.
          has_enough: told after each burst what every live request has said, int32[tokens]; where
            it says True the request ends there.
          expected: float[requests], tokens of the responses: of those that wait the longest begin
            first. In their order where not given.
        """
        clock, running = Stopwatch(), None
        with clock("schedule"):
            flight = Flight(self.specs, self.programs, self._weights[1], requests, expected)
        try:
            while flight.table.has_work:
                if running is None:
                    plan, stays = self._prepare(flight, planner, report, clock), True
                    began = clock.elapsed
                    with clock("decode"):
                        running = flight.bursts.launch(self._weights[0], plan.threshold)
                following = None
                if self.runs_ahead and stays:
                    with clock("schedule"):
                        following = flight.bursts.launch_next(
                            self._weights[0], running, plan.threshold
                        )
                live = flight.table.live
                if self._collect(flight, running, began, report, clock):
                    planner.observe(report.bursts[-1])
                if has_enough is not None:
                    flight.end(has_enough)
                running, began = following, clock.elapsed
                if running is not None and flight.table.has_work:
                    plan, balance = self._decide(flight, planner, clock)
                    stays = plan.split == flight.split and balance is None
                for i in live[flight.table.is_done[live]]:
                    yield int(i), flight.table.completion(i, self.eos_ids)
        finally:  # also where nobody takes the rest
            flight.release()
        report.preempted, report.prefill_tokens = flight.num_preempted, flight.prefill_tokens
        report.prefill_padding = 1 - flight.prefill_tokens / max(1, flight.prefill_slots)
        report.kv_waste = flight.bursts.kv_unused / max(1, flight.bursts.kv_slots)
        report.total_s, report.seconds = clock.elapsed, clock.seconds
        for done in report.switches:
            log.info("%s", describe_switch(done, report.total_s))
        report.done_after = np.sort(flight.table.done_after).tolist()

    def _prepare(
        self, flight: Flight, planner: Planner, report: RolloutReport, clock: Stopwatch
    ) -> Plan:
        """All that comes before a burst while none runs: pages, prefill, the plan, a switch."""
        with clock("prefill"):
            flight.admit(self._weights[0])
        plan, balance = self._decide(flight, planner, clock)
        if not report.bursts:
            count = len(flight.table.requests)
            log.info("first plan for %d sequences: %s", count, plan.reason)
        if plan.split != flight.split:
            began, source = clock.elapsed, flight.split
            with clock("switch"):
                report.switches.append(self._switch(flight, plan, report, began))
            switch = report.switches[-1]
            planner.observe_switch(source, plan, switch.seconds, switch.kv)
        elif balance is not None:
            with clock("balance"):
                report.balanced.append(flight.balance(balance))
            planner.observe_balance(balance, report.balanced[-1].seconds)
        with clock("schedule"):
            flight.fit()
        return plan

    @staticmethod
    def _decide(flight: Flight, planner: Planner, clock: Stopwatch) -> tuple[Plan, Balance | None]:
        """The layout of the next burst, and who goes to other groups where it is the same one."""
        with clock("plan"):
            load = flight.table.load()
            plan = planner.plan(load, flight.split)
            if plan.split != flight.split:
                return plan, None
            return plan, planner.balance(load, plan, flight.balance_options())

    def _collect(
        self,
        flight: Flight,
        burst: Burst,
        began: float,
        report: RolloutReport,
        clock: Stopwatch,
    ) -> bool:
        """Waits for a burst that has had the devices for itself since `began`, and books it.

        Returns whether its time says something of a step: not if it took none, because the one
        before had reached the threshold, nor if it was over before the host came to wait for it.
        """
        num_live, was_over = len(flight.table.live), burst.is_over
        with clock("decode"):
            steps, tokens, held = flight.bursts.collect(burst)
        if not steps:
            return False
        ran = Ran(*burst.shape, num_live, held, steps, clock.elapsed - began)
        report.add_burst(ran, began, tokens)
        return not (burst.is_ahead and was_over)

    def _switch(self, flight: Flight, plan: Plan, report: RolloutReport, began: float) -> Switch:
        """Weights, cache and rows to the plan's layout: the contribution, in two lines each way."""
        start, source, target = time.perf_counter(), flight.layout, self.layouts[plan.split]
        live = len(flight.table.live)
        carried = flight.carry(target, plan.recompute_below)
        weight_bytes, chunk_bytes = self.reslice(target)
        flight.compute(self._weights[0], carried.due)
        seconds = time.perf_counter() - start
        log.info("switch: %s; took %.3f s", plan.reason, seconds)
        return Switch(
            step=report.decode_steps,
            live=live,
            source=str(source),
            target=str(target),
            kv=way(carried.num_recomputed, live),
            bytes_moved=weight_bytes + carried.traffic.num_bytes,
            least_bytes=weight_bytes + carried.traffic.least_bytes,
            extra_bytes=carried.traffic.staging_bytes + chunk_bytes,
            seconds=seconds,
            predicted_saving_s=plan.predicted_saving_s,
            predicted_cost_s=plan.predicted_cost_s,
            reason=plan.reason,
            recompute_below=plan.recompute_below,
            at_s=began,
            predicted_remaining_s=plan.predicted_remaining_s,
        )
