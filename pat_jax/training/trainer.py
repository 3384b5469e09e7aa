"""Runs updates on devices: the pure functions of `rl`, compiled for the trainer's layout.

Parameters and optimizer state are split over all devices (FSDP over the data-parallel axes, TP over
the others). One compiled transfer hands the policy to the rollout. "Parameters" are the trained
ones: with LoRA, the adapters (`trainable_params.py`).
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pat_jax.common.pytree import with_sharding
from pat_jax.models.policy import Params
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.rl.algorithm.kl import Estimator, estimate_kl
from pat_jax.rl.algorithm.losses import Sums
from pat_jax.rl.algorithm.update import Update, TrainState, zero_gradients
from pat_jax.rl.batches.batches import MicroBatch, TrainBatch, with_no_routes
from pat_jax.training.drafter_state import DrafterState
from pat_jax.training.passes import Passes
from pat_jax.training.state_placement import StatePlacement
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.transfer import Receivers, Transfer
from pat_jax.training.update_seen import update_seen

# The stages of learning, named by the prefix of their programs' names.
REINFORCED, SUPERVISED = "", "supervised_"
# The columns that are log-probabilities under a policy: the one before the update, and the reference.
OLD, REFERENCE = "old_logprobs", "reference_logprobs"

# What an optimizer step returns: sums for metrics, the gradient's norm, and whether it was applied.
Record = tuple[Sums, Array, Array]


@dataclass(frozen=True)
class UpdateResult:
    metrics: dict[str, float]
    applied: tuple[bool, ...]  # for each optimizer step, whether the gradient was finite
    updates_applied: int  # number since the state's optimizer began


class Trainer:
    """The programs of the update, and the transfer of its parameters to a rollout layout."""

    def __init__(
        self,
        trained: TrainableParams,
        update: Update,
        receivers: Receivers,
        *,
        micro_shapes: Sequence[tuple[int, int]],
        num_iterations: int = 1,
        supervised: Update | None = None,
        has_reference: bool | None = None,
        has_logprobs: bool = False,
        is_offloaded: bool = False,
        beside: DrafterState | None = None,
    ):
        """
        Args:
          beside: arrays that a drafter keeps on the devices; None: nothing.
          has_logprobs: whether to compute the policy's log-probabilities even if the loss does not
            read them.
          has_reference: whether a frozen reference policy is kept; None: if the loss reads it.
          is_offloaded: whether the optimizer's moments are in the host's memory between two steps.
          supervised: the update of a preceding supervised stage, with its own optimizer.
        """
        self.trained, self.num_iterations = trained, num_iterations
        self.policy, self.layout, self.shardings = trained.policy, trained.layout, trained.shardings
        self.beside = beside or DrafterState()
        self.placement = StatePlacement(self.shardings, self.layout.sharding(), is_offloaded)
        needs = update.loss.needs
        self.has_reference = REFERENCE in needs if has_reference is None else has_reference
        # A reference that the loss does not read is for KL in the reward, which needs both columns.
        in_reward = (OLD, REFERENCE) if self.has_reference and REFERENCE not in needs else ()
        asked = {*needs, *in_reward, *[OLD] * has_logprobs}
        # Columns of log-probabilities that an update begins with; one program computes all of them.
        self.scored = tuple(name for name in (OLD, REFERENCE) if name in asked)
        self.updates = {REINFORCED: update} | ({SUPERVISED: supervised} if supervised else {})
        self.programs, self._passes = ProgramTable(), dict[str, Passes]()
        self.largest = micro_shapes[-1:]  # rows and length; empty if nothing is trained
        self._declare(receivers.dtype)
        self._declare_passes(micro_shapes)
        self.transfer = Transfer(self.programs, trained, receivers, update.score_step)

    def compile(
        self, progress: Callable[[int, int], None] | None = None, *, by_need: bool = False
    ) -> None:
        """Compiles the programs.

        Args:
          by_need: compile only the passes of the largest micro-batch now, others at first use.
        """
        asked = self._is_first if by_need else lambda key: True
        threads = os.cpu_count() or 1
        self.programs.compile_all(threads=threads, progress=progress, only=asked)

    def to_compile(self, *, by_need: bool) -> int:
        """Returns how many programs `compile` would compile."""
        missing = self.programs.missing()
        return sum(map(self._is_first, missing)) if by_need else len(missing)

    def _is_first(self, key: Key) -> bool:
        return key.rows == 0 or (key.rows, key.length) in self.largest

    @property
    def abstract_params(self) -> Params:
        return self.trained.abstract

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes with shardings of the state between two optimizer steps."""
        shapes = jax.eval_shape(self.updates[REINFORCED].init, self.abstract_params)
        return with_sharding(shapes, self.placement.at_rest(shapes))

    @cached_property
    def state_in_a_step(self) -> TrainState:
        """Shapes with shardings of the state during an optimizer step, on the devices."""
        state = self.abstract_state
        return with_sharding(state, self.placement.in_a_step(state))

    @property
    def resident(self) -> list[Any]:
        """Shapes with shardings of what stays on the devices during a rollout."""
        reference = [self.abstract_params] * self.has_reference
        state = self.placement.on_devices(self.abstract_state)
        return [state, self.trained.abstract_frozen, *reference, self.beside.always]

    def _declare(self, rollout_dtype: jnp.dtype) -> None:
        split, everywhere = self.layout.split, self.layout.sharding()
        declare, params = self.programs.declare, self.abstract_params
        state, shardings = self.state_in_a_step, self.placement.in_a_step(self.abstract_state)
        at_rest = self.placement.at_rest(state)
        init = {"out_shardings": at_rest, "donate_argnums": 0}
        declare(Key("init_state", split), self.updates[REINFORCED].init, params, **init)
        declare(Key("zero_gradients", split), zero_gradients, params, out_shardings=self.shardings)
        declare(Key("copy", split), _copy, params, out_shardings=self.shardings)
        if lora := self.trained.lora:
            seen = partial(update_seen, scale=lora.scale, dtype=rollout_dtype)
            declare(Key("update_seen", split), seen, params, params, out_shardings=everywhere)
        grads = self.trained.abstract_gradients
        applied = {"out_shardings": (shardings, everywhere, everywhere), "donate_argnums": 0}
        for stage, update in self.updates.items():
            declare(Key(f"{stage}apply", split), update.apply_step, state, grads, **applied)

    def _declare_passes(self, micro_shapes: Sequence[tuple[int, int]]) -> None:
        """Declares each stage's passes; stages that differ only in the optimizer share them."""
        for stage, update in self.updates.items():
            equal = [one for one in self._passes.values() if update.has_passes_of(one.update)]
            scored = self.scored if stage == REINFORCED else ()
            made_of = self.programs, self.trained, update, micro_shapes
            self._passes[stage] = (equal or [Passes(*made_of, stage=stage, scored=scored)])[0]

    def __getitem__(self, name: str) -> Callable:
        return self.programs[Key(name, self.layout.split)]

    def init(self, seed: int) -> Params:
        return self.trained.init(seed)

    def freeze(self, base: Params) -> int:
        """Sets the policy that the adapters are added to, in the form of `trained.abstract_frozen`.

        Returns:
          A checksum of its values, the same in bfloat16 and float32.
        """
        self.trained.frozen = base
        return self.transfer.base_checksum(base)

    def update(
        self, state: TrainState, batch: TrainBatch, reference: Params | None
    ) -> tuple[TrainState, UpdateResult]:
        """Takes every optimizer step of one iteration's batch.

        Args:
          reference: parameters of the frozen reference policy, if one is kept.

        Raises:
          ValueError: a column that the loss needs is neither in the batch nor computed.
        """
        loss = self.updates[REINFORCED].loss
        if not {*loss.needs}.isdisjoint(self.scored):
            batch = self.with_logprobs(batch, {OLD: state.params, REFERENCE: reference})
        mini_batches = [
            [replace(micro, columns=loss.read(micro.columns)) for micro in mini]
            for mini in batch.mini_batches
        ]
        for micro in chain.from_iterable(mini_batches):
            # Compile before the devices are busy.
            self._passes[REINFORCED].program("grad", micro)
        before = self["copy"](state.params) if self.trained.lora else None
        records = []
        for _ in range(self.num_iterations):
            for mini in mini_batches:
                state, record = self._step(REINFORCED, state, mini)
                records.append(record)
        result = _summary(self.updates[REINFORCED], records, state)
        if before is not None:
            result.metrics["train/update_seen"] = float(self["update_seen"](before, state.params))
        return state, result

    def supervised_step(
        self, state: TrainState, micro_batches: Sequence[MicroBatch]
    ) -> tuple[TrainState, UpdateResult]:
        """Takes an optimizer step on demonstrations; `train/cross_entropy` is that of responses."""
        loss = self.updates[SUPERVISED].loss
        mini = [replace(micro, columns=loss.read(micro.columns)) for micro in micro_batches]
        state, record = self._step(SUPERVISED, state, mini)
        return state, _summary(self.updates[SUPERVISED], [record], state)

    def reference_kl(
        self, state: TrainState, batch: TrainBatch, reference: Params, estimator: Estimator
    ) -> tuple[TrainBatch, list[np.ndarray]]:
        """Estimates KL(policy || reference) at each token of each response.

        Returns:
          The batch with the columns computed for this, and the KL in nats, in the form of
          `TrainBatch.by_response`.
        """
        scored = self.with_logprobs(batch, {OLD: state.params, REFERENCE: reference})
        both = zip(scored.by_response(OLD), scored.by_response(REFERENCE), strict=True)
        return scored, [estimate_kl(old, other, estimator) for old, other in both]

    def with_logprobs(self, batch: TrainBatch, policies: Mapping[str, Params | None]) -> TrainBatch:
        """Returns the batch with the columns of `scored`, computing those that are not there.

        Args:
          policies: for each column, the parameters of the policy that computes it.

        Raises:
          ValueError: the parameters for a column are missing.
        """
        known = {name: params for name, params in policies.items() if params is not None}
        if missing := [name for name in self.scored if name not in known]:
            raise ValueError(f"{', '.join(missing)} is missing: expected the policy it is under")
        computed = {name: known[name] for name in self.scored}
        mini_batches = [
            [self._with_logprobs(micro, computed) for micro in mini] for mini in batch.mini_batches
        ]
        return replace(batch, mini_batches=mini_batches)

    def _with_logprobs(self, micro: MicroBatch, policies: Mapping[str, Params]) -> MicroBatch:
        if policies.keys() <= micro.columns.keys():
            return micro
        rows = self._with_routes(replace(micro, columns={}))
        program = self._passes[REINFORCED].program("logprobs", micro)
        computed = program(self.trained.frozen, policies, rows)
        if self.layout.spans_processes:  # each process has all of it, to read and for its devices
            computed = {name: np.asarray(column) for name, column in computed.items()}
        return replace(micro, columns={**micro.columns, **computed})

    def _with_routes(self, micro: MicroBatch) -> MicroBatch:
        """Adds empty routes if none are recorded: programs of models with experts need them."""
        config = self.policy.config
        if config.experts is None or micro.routes is not None:
            return micro
        return with_no_routes(micro, config.routes_shape)

    def _step(
        self, stage: str, state: TrainState, micro_batches: Sequence[MicroBatch]
    ) -> tuple[TrainState, Record]:
        grads = self["zero_gradients"](state.params)
        passes = self._passes[stage]
        sums = passes.zero_sums()
        for micro in map(self._with_routes, micro_batches):
            grad_step = passes.program("grad", micro)
            grads, sums = grad_step(self.trained.frozen, state.params, micro, grads, sums)
        apply = self[f"{stage}apply"]
        state, grad_norm, is_applied = apply(self.placement.fetched(state), grads)
        return self.placement.rested(state), (sums, grad_norm, is_applied)


def _copy(params: Params) -> Params:
    return jax.tree.map(jnp.copy, params)


def _summary(update: Update, records: Sequence[Record], state: TrainState) -> UpdateResult:
    """Summarizes optimizer steps, fetched from the devices once; `state` is after the last."""
    fetched, step = jax.device_get((list(records), state.step))
    sums, norms, applied = zip(*fetched, strict=True)
    metrics = {f"train/{name}": value for name, value in update.summary(sums).items()}
    counted = [norm for norm, one in zip(norms, sums, strict=True) if one["weight"] > 0]
    metrics["train/grad_norm"] = float(np.mean(counted)) if counted else math.nan
    metrics["train/skipped_updates"] = float(len(applied) - sum(applied))
    return UpdateResult(metrics, tuple(map(bool, applied)), int(step))
