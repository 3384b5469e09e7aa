"""The update on devices: the pure functions of `rl`, compiled for the trainer's layout.

Parameters and optimizer state are split over all devices (FSDP over the data-parallel axes, TP over
the others). Hands the policy to the rollout as one compiled transfer. Its parameters are those that
are trained, with LoRA the adapters (`trained.py`).
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
from jax.typing import ArrayLike
from jaxtyping import Array

from pat_jax.common.pytree import with_sharding
from pat_jax.layout.layout import AutoPartition, Layout
from pat_jax.models.lora import Lora
from pat_jax.models.partition import Whole
from pat_jax.models.policy import Params, Policy
from pat_jax.models.transformer import logits
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.rl.algorithm.kl import Estimator, estimate_kl
from pat_jax.rl.algorithm.losses import Loss, Sums
from pat_jax.rl.algorithm.update import ModelFunctions, PolicyUpdate, TrainState, zero_gradients
from pat_jax.rl.batches.batches import MicroBatch, TrainBatch, abstract_micro_batch
from pat_jax.training.beside import Beside
from pat_jax.training.state_placement import StatePlacement
from pat_jax.training.trained import Trained
from pat_jax.training.transfer import declare_transfer
from pat_jax.training.update_seen import update_seen

# The stages of learning, by what the names of their programs begin with.
REINFORCED, SUPERVISED = "", "supervised_"
# The columns that are log-probabilities under a policy: the one before the update, and the reference.
OLD, REFERENCE = "old_logprobs", "reference_logprobs"

Record = tuple[Sums, Array, Array]  # of an optimizer step: metrics, norm, whether it was applied


def model_functions(
    policy: Policy,
    layout: Layout,
    dtype: jnp.dtype,
    *,
    remat: str = "full",
    scan_layers: bool = False,
) -> ModelFunctions:
    """The policy in this layout, computed in `dtype`."""
    partition = AutoPartition(layout)

    def forward(params: Params, tokens: Array, positions: Array) -> Array:
        model, how = policy.bind(params), {"remat": remat, "scan_layers": scan_layers}
        return model(tokens, positions, partition=partition, dtype=dtype, **how)[0]

    def head(params: Params) -> Array:
        return policy.bind(params).head

    return ModelFunctions(forward, partial(logits, partition=Whole()), head, partition.by_rows)


@dataclass(frozen=True)
class UpdateResult:
    metrics: dict[str, float]
    applied: tuple[bool, ...]  # of its optimizer steps, whether the gradient was finite
    updates_applied: int  # since the state's optimizer began


class Trainer:
    """The programs of the update, and the transfer of its parameters to a rollout layout."""

    def __init__(
        self,
        policy: Policy,
        layout: Layout,
        update: PolicyUpdate,
        *,
        micro_shapes: Sequence[tuple[int, int]],
        rollout_layouts: dict[Split, Layout],
        rollout_dtype: jnp.dtype,
        num_iterations: int = 1,
        supervised: PolicyUpdate | None = None,
        rollout_policy: Policy | None = None,
        has_reference: bool | None = None,
        has_logprobs: bool = False,
        lora: Lora | None = None,
        base_dtype: jnp.dtype = jnp.float32,
        weight_dtype: jnp.dtype = jnp.float32,
        is_offloaded: bool = False,
        beside: Beside | None = None,
    ):
        """
        Args:
          base_dtype: of the policy under the adapters.
          beside: what drafts keep on the devices; nothing where not given.
          has_logprobs: whether log-probabilities are asked for that the loss does not look at.
          has_reference: whether a frozen reference policy is kept; if not given, whether the loss
            looks at it.
          is_offloaded: whether the optimizer's moments rest in the host's memory between two steps.
          lora: the adapters that are trained; where not given, all of `policy` is.
          rollout_policy: as the rollout keeps it; `policy` where not given.
          supervised: the update of a supervised stage before, with its own optimizer.
          weight_dtype: in which the policy is kept, where all of it is trained.
        """
        self.policy, self.layout, self.num_iterations = policy, layout, num_iterations
        self._beside = beside or Beside()
        self.updates = {REINFORCED: update} | ({SUPERVISED: supervised} if supervised else {})
        # Whose passes each stage runs: those of the first stage that is equal but for the optimizer.
        self._passes = {
            stage: next(s for s, first in self.updates.items() if update.has_passes_of(first))
            for stage, update in self.updates.items()
        }
        looks_at_it = REFERENCE in update.loss.needs
        self.has_reference = looks_at_it if has_reference is None else has_reference
        # A reference that the loss does not look at is for KL in the reward, which is between both.
        in_reward = (OLD, REFERENCE) if self.has_reference and not looks_at_it else ()
        asked = {*update.loss.needs, *in_reward, *[OLD] * has_logprobs}
        # Columns of log-probabilities that an update begins with, all of them by one program.
        self.scored = tuple(name for name in (OLD, REFERENCE) if name in asked)
        self.programs = ProgramTable()
        self.sent: int | None = None  # checksum of the policy that a rollout was handed last
        self.trained = Trained(policy, layout, lora, base_dtype, weight_dtype)
        self._rollout_dtype = rollout_dtype
        self.shardings = self.trained.shardings
        self._placement = StatePlacement(self.shardings, layout.sharding(), is_offloaded)
        self._largest = micro_shapes[-1:]  # none where nothing is trained
        self._declare(micro_shapes)
        self._checksums = declare_transfer(
            self.programs,
            self.trained,
            rollout_policy or policy,
            rollout_layouts,
            rollout_dtype,
            update.score_step,
        )

    def compile(
        self, progress: Callable[[int, int], None] | None = None, *, by_need: bool = False
    ) -> None:
        """
        Args:
          by_need: of the passes over micro-batches those of the largest alone; the others are compiled when
            the first such micro-batch comes.
        """
        asked = self._is_first if by_need else lambda key: True
        threads = os.cpu_count() or 1
        self.programs.compile_all(threads=threads, progress=progress, only=asked)

    def to_compile(self, *, by_need: bool) -> int:
        """How many programs `compile` would compile."""
        missing = self.programs.missing()
        return sum(map(self._is_first, missing)) if by_need else len(missing)

    def _is_first(self, key: Key) -> bool:
        return key.rows == 0 or (key.rows, key.length) in self._largest

    @property
    def abstract_params(self) -> Params:
        return self.trained.abstract

    @cached_property
    def abstract_gradients(self) -> Params:
        return with_sharding(jax.eval_shape(zero_gradients, self.abstract_params), self.shardings)

    @cached_property
    def abstract_state(self) -> TrainState:
        """Between two optimizer steps."""
        shapes = jax.eval_shape(self.updates[REINFORCED].init, self.abstract_params)
        return with_sharding(shapes, self._placement.at_rest(shapes))

    @cached_property
    def state_in_a_step(self) -> TrainState:
        """The same during one, on the devices."""
        state = self.abstract_state
        return with_sharding(state, self._placement.in_a_step(state))

    @property
    def resident(self) -> list[Any]:
        """Shapes with shardings of what stays on the devices during a rollout."""
        reference = [self.abstract_params] * self.has_reference
        state = self._placement.on_devices(self.abstract_state)
        return [state, self.trained.abstract_frozen, *reference, self._beside.always]

    @property
    def resident_in_updates(self) -> list[Any]:
        """Shapes with shardings of what lies on the devices during an update, whichever of its programs runs."""
        before = [self.abstract_params] if self.trained.lora else []  # of `update_seen`
        return [*self.resident, self._beside.in_updates, *before]

    @property
    def of_drafts(self) -> list[Any]:
        """What drafts have of that."""
        return [self._beside.always, self._beside.in_updates]

    @property
    def offloaded(self) -> list[Params]:
        """Shapes with shardings of what a step fetches from the host's memory and sends back."""
        return self._placement.offloaded(self.state_in_a_step)

    def _declare(self, micro_shapes: Sequence[tuple[int, int]]) -> None:
        split, everywhere, declare = (
            self.layout.split,
            self.layout.sharding(),
            self.programs.declare,
        )
        params, grads = self.abstract_params, self.abstract_gradients
        state, shardings = self.state_in_a_step, self._placement.in_a_step(self.abstract_state)
        at_rest = self._placement.at_rest(state)
        init = {"out_shardings": at_rest, "donate_argnums": 0}
        declare(Key("init_state", split), self.updates[REINFORCED].init, params, **init)
        declare(Key("zero_gradients", split), zero_gradients, params, out_shardings=self.shardings)
        declare(Key("copy", split), _copy, params, out_shardings=self.shardings)
        if lora := self.trained.lora:
            seen = partial(update_seen, scale=lora.scale, dtype=self._rollout_dtype)
            declare(Key("update_seen", split), seen, params, params, out_shardings=everywhere)
        applied = {"out_shardings": (shardings, everywhere, everywhere), "donate_argnums": 0}
        for stage, update in self.updates.items():
            declare(Key(f"{stage}apply", split), update.apply_step, state, grads, **applied)
            if self._passes[stage] == stage:
                self._declare_passes(stage, micro_shapes)

    def _declare_passes(self, stage: str, micro_shapes: Sequence[tuple[int, int]]) -> None:
        """Forward and backward for each micro-batch shape."""
        split, everywhere, params = self.layout.split, self.layout.sharding(), self.abstract_params
        update, declare = self.updates[stage], self.programs.declare
        needs, zeros = update.loss.needs, update.loss.zero_sums
        declare(Key(f"{stage}zero_sums", split), zeros, out_shardings=everywhere)
        sums = jax.eval_shape(zeros)
        sums = with_sharding(sums, jax.tree.map(lambda _: everywhere, sums))
        accumulated = {"out_shardings": (self.shardings, everywhere), "donate_argnums": (3, 4)}

        def grad_step(
            frozen: Params, params: Params, micro: MicroBatch, grads: Params, sums: Sums
        ) -> tuple[Params, Sums]:
            return self.trained.over(frozen, update).grad_step(params, micro, grads, sums)

        def logprob_step(
            frozen: Params, policies: Mapping[str, Params], micro: MicroBatch
        ) -> dict[str, Array]:
            over = self.trained.over(frozen, update)
            return {name: over.logprob_step(p, micro)[0] for name, p in policies.items()}

        frozen, policies = self.trained.abstract_frozen, dict.fromkeys(self.scored, params)
        by_rows = self.layout.sharding("batch", role="train")
        for shape in micro_shapes:
            micro = self.abstract_micro(shape, needs)
            args = frozen, params, micro, self.abstract_gradients, sums
            declare(Key(f"{stage}grad", split, *shape), grad_step, *args, **accumulated)
            if self.scored and stage == REINFORCED:
                declare(
                    Key("logprobs", split, *shape),
                    logprob_step,
                    frozen,
                    policies,
                    self.abstract_micro(shape, ()),
                    out_shardings=everywhere if self.layout.spans_processes else by_rows,
                )

    def abstract_micro(self, shape: tuple[int, int], columns: Sequence[str]) -> MicroBatch:
        micro = abstract_micro_batch(*shape, columns)
        by_rows = self.layout.sharding("batch", role="train")
        return with_sharding(micro, jax.tree.map(lambda _: by_rows, micro))

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
        assert self._checksums.base is not None, "there are adapters"
        return self._checksums.base(base)

    def score(self, params: Params, tokens: ArrayLike) -> Array:
        """log π(next token) in nats of tokens[rows, length], by what is sent to a rollout."""
        return self["score"](self.trained.frozen, params, tokens)

    def transfer(self, params: Params, layout: Layout) -> Params:
        """The policy on the rollout's shards, as it is kept there, checked against the sender's.

        Raises:
          RuntimeError: what arrived is not what was sent.
        """
        source, target = self.layout.split, layout.split
        held = self.trained.frozen, params
        assert self._checksums.sent is not None, "somebody receives it"
        self.sent = sent_sum = self._checksums.sent(self.trained.unscaled(*held))
        received = self.programs[Key("transfer", source, target=target)](*held)
        received_sum = self._checksums.received[target](received)
        if sent_sum != received_sum:
            raise RuntimeError(
                f"weight transfer {source} to {target}: checksum {received_sum} arrived, "
                f"{sent_sum} was sent; the rollout would sample another policy."
            )
        return received

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
            self._pass(REINFORCED, "grad", micro)
        before = self["copy"](state.params) if self.trained.lora else None
        records = []
        for _ in range(self.num_iterations):
            for mini in mini_batches:
                state, record = self._step(REINFORCED, state, mini)
                records.append(record)
        result = _summary(self.updates[REINFORCED].loss, records, state)
        if before is not None:
            result.metrics["train/update_seen"] = float(self["update_seen"](before, state.params))
        return state, result

    def supervised_step(
        self, state: TrainState, micro_batches: Sequence[MicroBatch]
    ) -> tuple[TrainState, UpdateResult]:
        """One optimizer step on demonstrations; `train/cross_entropy` is that of their responses."""
        loss = self.updates[SUPERVISED].loss
        mini = [replace(micro, columns=loss.read(micro.columns)) for micro in micro_batches]
        state, record = self._step(SUPERVISED, state, mini)
        return state, _summary(self.updates[SUPERVISED].loss, [record], state)

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
        rows = replace(micro, columns={})
        computed = self._pass(REINFORCED, "logprobs", micro)(self.trained.frozen, policies, rows)
        if self.layout.spans_processes:  # each has all of it, to read and to hand to its devices
            computed = {name: np.asarray(column) for name, column in computed.items()}
        return replace(micro, columns={**micro.columns, **computed})

    def _pass(self, stage: str, name: str, micro: MicroBatch) -> Callable:
        key = Key(f"{self._passes[stage]}{name}", self.layout.split, *micro.tokens.shape)
        return self.programs[key]

    def _step(
        self, stage: str, state: TrainState, micro_batches: Sequence[MicroBatch]
    ) -> tuple[TrainState, Record]:
        grads = self["zero_gradients"](state.params)
        sums = self[f"{self._passes[stage]}zero_sums"]()
        for micro in micro_batches:
            grad_step = self._pass(stage, "grad", micro)
            grads, sums = grad_step(self.trained.frozen, state.params, micro, grads, sums)
        apply = self[f"{stage}apply"]
        state, grad_norm, is_applied = apply(self._placement.fetched(state), grads)
        return self._placement.rested(state), (sums, grad_norm, is_applied)


def _copy(params: Params) -> Params:
    return jax.tree.map(jnp.copy, params)


def _summary(loss: Loss, records: Sequence[Record], state: TrainState) -> UpdateResult:
    """Over the optimizer steps, fetched from the devices once; `state` is that after the last."""
    fetched, step = jax.device_get((list(records), state.step))
    sums, norms, applied = zip(*fetched, strict=True)
    metrics = {f"train/{name}": value for name, value in loss.summary(sums).items()}
    counted = [norm for norm, one in zip(norms, sums, strict=True) if one["weight"] > 0]
    metrics["train/grad_norm"] = float(np.mean(counted)) if counted else math.nan
    metrics["train/skipped_updates"] = float(len(applied) - sum(applied))
    return UpdateResult(metrics, tuple(map(bool, applied)), int(step))
