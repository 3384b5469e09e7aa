"""The update on devices: the pure functions of `rl`, compiled for the trainer's layout.

Parameters and optimizer state are split over all devices (FSDP over the data-parallel axes, TP over
the others). Hands the policy to the rollout as one compiled transfer. Its parameters are those that
are trained, with LoRA the adapters (`trainable_params.py`).
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
from pat_jax.rl.algorithm.update import PolicyUpdate, TrainState, zero_gradients
from pat_jax.rl.batches.batches import MicroBatch, TrainBatch, with_no_routes
from pat_jax.training.drafter_state import DrafterState
from pat_jax.training.passes import Passes
from pat_jax.training.state_placement import StatePlacement
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.transfer import Receivers, Transfer
from pat_jax.training.update_seen import update_seen

# The stages of learning, by what the names of their programs begin with.
REINFORCED, SUPERVISED = "", "supervised_"
# The columns that are log-probabilities under a policy: the one before the update, and the reference.
OLD, REFERENCE = "old_logprobs", "reference_logprobs"

Record = tuple[Sums, Array, Array]  # of an optimizer step: metrics, norm, whether it was applied


@dataclass(frozen=True)
class UpdateResult:
    metrics: dict[str, float]
    applied: tuple[bool, ...]  # of its optimizer steps, whether the gradient was finite
    updates_applied: int  # since the state's optimizer began


class Trainer:
    """The programs of the update, and the transfer of its parameters to a rollout layout."""

    def __init__(
        self,
        trained: TrainableParams,
        update: PolicyUpdate,
        receivers: Receivers,
        *,
        micro_shapes: Sequence[tuple[int, int]],
        num_iterations: int = 1,
        supervised: PolicyUpdate | None = None,
        has_reference: bool | None = None,
        has_logprobs: bool = False,
        is_offloaded: bool = False,
        beside: DrafterState | None = None,
    ):
        """
        Args:
          beside: what drafts keep on the devices; nothing where not given.
          has_logprobs: whether log-probabilities are asked for that the loss does not look at.
          has_reference: whether a frozen reference policy is kept; if not given, whether the loss
            looks at it.
          is_offloaded: whether the optimizer's moments rest in the host's memory between two steps.
          supervised: the update of a supervised stage before, with its own optimizer.
        """
        self.trained, self.num_iterations = trained, num_iterations
        self.policy, self.layout, self.shardings = trained.policy, trained.layout, trained.shardings
        self.beside = beside or DrafterState()
        self.placement = StatePlacement(self.shardings, self.layout.sharding(), is_offloaded)
        needs = update.loss.needs
        self.has_reference = REFERENCE in needs if has_reference is None else has_reference
        # A reference that the loss does not look at is for KL in the reward, which is between both.
        in_reward = (OLD, REFERENCE) if self.has_reference and REFERENCE not in needs else ()
        asked = {*needs, *in_reward, *[OLD] * has_logprobs}
        # Columns of log-probabilities that an update begins with, all of them by one program.
        self.scored = tuple(name for name in (OLD, REFERENCE) if name in asked)
        self.updates = {REINFORCED: update} | ({SUPERVISED: supervised} if supervised else {})
        self.programs, self._passes = ProgramTable(), dict[str, Passes]()
        self.largest = micro_shapes[-1:]  # rows and length; none where nothing is trained
        self._declare(receivers.dtype)
        self._declare_passes(micro_shapes)
        self.transfer = Transfer(self.programs, trained, receivers, update.score_step)

    def compile(
        self, progress: Callable[[int, int], None] | None = None, *, by_need: bool = False
    ) -> None:
        """`by_need`: of the passes those of the largest micro-batch; others when one comes."""
        asked = self._is_first if by_need else lambda key: True
        threads = os.cpu_count() or 1
        self.programs.compile_all(threads=threads, progress=progress, only=asked)

    def to_compile(self, *, by_need: bool) -> int:
        """How many programs `compile` would compile."""
        missing = self.programs.missing()
        return sum(map(self._is_first, missing)) if by_need else len(missing)

    def _is_first(self, key: Key) -> bool:
        return key.rows == 0 or (key.rows, key.length) in self.largest

    @property
    def abstract_params(self) -> Params:
        return self.trained.abstract

    @cached_property
    def abstract_state(self) -> TrainState:
        """Between two optimizer steps."""
        shapes = jax.eval_shape(self.updates[REINFORCED].init, self.abstract_params)
        return with_sharding(shapes, self.placement.at_rest(shapes))

    @cached_property
    def state_in_a_step(self) -> TrainState:
        """The same during one, on the devices."""
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
        """Of each stage, unless an earlier one is equal except for the optimizer."""
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
        """Takes the policy that the adapters are added to, as `trained.abstract_frozen` has it.

        Returns:
          A checksum of its values, the same in bfloat16 as in float32.
        """
        self.trained.frozen = base
        return self.transfer.base_checksum(base)

    def update(
        self, state: TrainState, batch: TrainBatch, reference: Params | None
    ) -> tuple[TrainState, UpdateResult]:
        """Every optimizer step of one iteration's batch.

        Args:
          reference: parameters of the frozen reference policy, where one is kept.

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
            # Before the devices are busy: they would compute while a compiler is waited for.
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
        """One optimizer step on demonstrations; `train/cross_entropy` is of their responses."""
        loss = self.updates[SUPERVISED].loss
        mini = [replace(micro, columns=loss.read(micro.columns)) for micro in micro_batches]
        state, record = self._step(SUPERVISED, state, mini)
        return state, _summary(self.updates[SUPERVISED], [record], state)

    def reference_kl(
        self, state: TrainState, batch: TrainBatch, reference: Params, estimator: Estimator
    ) -> tuple[TrainBatch, list[np.ndarray]]:
        """How far the policy is from the reference at each token of each response.

        Returns:
          The batch with the columns that this took, and KL(policy || reference) in nats, as
          `TrainBatch.by_response` returns a column.
        """
        scored = self.with_logprobs(batch, {OLD: state.params, REFERENCE: reference})
        both = zip(scored.by_response(OLD), scored.by_response(REFERENCE), strict=True)
        return scored, [estimate_kl(old, other, estimator) for old, other in both]

    def with_logprobs(self, batch: TrainBatch, policies: Mapping[str, Params | None]) -> TrainBatch:
        """With the columns of `scored`, unless they are there.

        Args:
          policies: the parameters that each column is computed by.

        Raises:
          ValueError: those of a column are missing.
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
        if self.layout.spans_processes:  # each has all of it, to read and to hand to its devices
            computed = {name: np.asarray(column) for name, column in computed.items()}
        return replace(micro, columns={**micro.columns, **computed})

    def _with_routes(self, micro: MicroBatch) -> MicroBatch:
        """Programs of a model with experts are given routes, recorded or not."""
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


def _summary(update: PolicyUpdate, records: Sequence[Record], state: TrainState) -> UpdateResult:
    """Over the optimizer steps, fetched from the devices once; `state` is that after the last."""
    fetched, step = jax.device_get((list(records), state.step))
    sums, norms, applied = zip(*fetched, strict=True)
    metrics = {f"train/{name}": value for name, value in update.summary(sums).items()}
    counted = [norm for norm, one in zip(norms, sums, strict=True) if one["weight"] > 0]
    metrics["train/grad_norm"] = float(np.mean(counted)) if counted else math.nan
    metrics["train/skipped_updates"] = float(len(applied) - sum(applied))
    return UpdateResult(metrics, tuple(map(bool, applied)), int(step))
