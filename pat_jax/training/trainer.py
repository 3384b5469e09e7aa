"""A trained role, the policy or the critic: the pure functions of `rl`, compiled for its layout.

Parameters and optimizer state are split over all devices (FSDP over the data-parallel axes, TP over
the others). One compiled transfer hands the policy to the rollout. "Parameters" are the trained
ones: with LoRA, the adapters (`trainable_params.py`).
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from pat_jax.common.owners import is_absent, known_to_all
from pat_jax.common.pytree import with_sharding
from pat_jax.models.policy import Params
from pat_jax.programs.programs import Key
from pat_jax.rl.algorithm.losses import LOGPROBS, PREDICTED, VALUES
from pat_jax.rl.algorithm.update import TrainState, Update
from pat_jax.rl.batches.train_batch import MicroBatch, TrainBatch
from pat_jax.training.drafter_state import DrafterState
from pat_jax.training.handle import Handle
from pat_jax.training.passes import Passes
from pat_jax.training.predictions import Predictions, with_routes_of
from pat_jax.training.rest import fetched
from pat_jax.training.state_placement import Resting, StatePlacement
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.transfer import Receivers, Transfer
from pat_jax.training.update_result import Record, UpdateResult, summarized, update_seen

POLICY, CRITIC = "train", "critic"  # names of trained roles
# The stages of learning, named by the prefix of their programs' names.
REINFORCED = ""
SUPERVISED = "supervised_"
# The column for the model's predictions before an update, by the kind of prediction.
OLD = {LOGPROBS: "old_logprobs", VALUES: "old_values"}


class Trainer(Handle):
    """A trained role's programs: its update, and the transfer of its parameters to rollouts."""

    def __init__(
        self,
        trained: TrainableParams,
        update: Update,
        receivers: Receivers,
        *,
        micro_shapes: Sequence[tuple[int, int]],
        name: str = POLICY,
        num_iterations: int = 1,
        supervised: Update | None = None,
        predicts: bool = False,
        others: Sequence[Any] = (),
        is_offloaded: bool = False,
        rests: Resting = "nothing",
        beside: DrafterState | None = None,
    ):
        """
        Args:
          beside: arrays that a drafter keeps on the devices, if any.
          is_offloaded: whether the optimizer's moments are on the devices only in its steps.
          name: name of the role in checkpoints, and the prefix of its metrics.
          others: shapes with shardings of arrays that other roles keep on the devices.
          rests: the part of the state that is in the host's memory between two updates.
          predicts: whether the model predicts before an update even if the loss need not.
          supervised: the update of a preceding supervised stage, with its own optimizer.
        """
        super().__init__(trained.layout, micro_shapes)
        self.trained, self.policy, self.shardings = trained, trained.policy, trained.shardings
        self.num_iterations = num_iterations
        self.name = name
        self.beside = beside or DrafterState()
        self.placement = StatePlacement(self.shardings, self.layout.sharding(), is_offloaded, rests)
        self.old = OLD[PREDICTED[trained.policy.config.head][0]]
        self.predicts = predicts or self.old in update.loss.needs
        self.others = others
        self.updates = {REINFORCED: update} | ({SUPERVISED: supervised} if supervised else {})
        self._passes = dict[str, Passes]()
        self._declare(receivers.dtype)
        self._declare_passes(micro_shapes)
        self.transfer = Transfer(self.programs, trained, receivers, update.predictor.score_step)

    @property
    def tells_seen(self) -> bool:
        """Whether each update reports which share of its change a rollout sees (`update_seen`)."""
        return self.trained.lora is not None and self.policy.config.head == "vocab"

    @property
    def abstract_params(self) -> Params:
        return self.trained.abstract

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes with shardings of the state between two updates."""
        shapes = jax.eval_shape(self.updates[REINFORCED].init, self.abstract_params)
        return with_sharding(shapes, self.placement.at_rest(shapes))

    @cached_property
    def state_in_a_step(self) -> TrainState:
        """Shapes with shardings of the state during an optimizer step, on the devices."""
        state = self.abstract_state
        return with_sharding(state, self.placement.in_a_step(state))

    @property
    def kept(self) -> list[Any]:
        """Shapes with shardings of this role's arrays on the devices between two updates."""
        state = self.placement.on_devices(self.abstract_state)
        return [state, self.own_base, self.beside.always]

    @property
    def resident(self) -> list[Any]:
        """Shapes with shardings of all roles' arrays that stay on the devices during a rollout."""
        return [*self.kept, *self.others]

    @property
    def held(self) -> list[Any]:
        """Shapes with shardings of all roles' arrays on the devices in the passes of an update,
        except gradients."""
        state = self.placement.on_devices(self.state_in_a_step, in_an_update=True)
        beside = self.beside.always, self.beside.in_updates
        return [state, self.own_base, *beside, *self.others]

    @property
    def own_base(self) -> Any:
        """Shapes with shardings of the base under the adapters, if no other role has it."""
        return {} if self.trained.shares_base else self.trained.abstract_frozen

    def _declare(self, rollout_dtype: jnp.dtype) -> None:
        split = self.layout.split
        everywhere = self.layout.sharding()
        declare = self.programs.declare
        params = self.abstract_params
        state = self.state_in_a_step
        shardings = self.placement.in_a_step(self.abstract_state)
        init = {"out_shardings": self.placement.initial(state), "donate_argnums": 0}
        declare(Key("init_state", split), self.updates[REINFORCED].init, params, **init)
        gradients = self.trained.gradients
        of_gradients = gradients.shardings
        zeros = {"out_shardings": of_gradients}
        declare(Key("zero_gradients", split), gradients.zero_gradients, params, **zeros)
        declare(Key("copy", split), _copy, params, out_shardings=self.shardings)
        if (lora := self.trained.lora) and self.tells_seen:
            seen = partial(update_seen, scale=lora.scale, dtype=rollout_dtype)
            declare(Key("update_seen", split), seen, params, params, out_shardings=everywhere)
        grads = self.trained.abstract_gradients
        applied = {"out_shardings": (shardings, everywhere, everywhere), "donate_argnums": 0}
        for stage, update in self.updates.items():
            step = partial(gradients.apply_step, update)
            declare(Key(f"{stage}apply", split), step, state, grads, **applied)

    def _declare_passes(self, micro_shapes: Sequence[tuple[int, int]]) -> None:
        """Declares predictions and each stage's passes, which may differ only in the optimizer."""
        shapes = micro_shapes if self.predicts else ()
        predictor = self.updates[REINFORCED].predictor
        self._predictions = Predictions(self.programs, self.trained, predictor, shapes)
        for stage, update in self.updates.items():
            equal = [one for one in self._passes.values() if update.has_passes_of(one.update)]
            if not equal:
                equal = [Passes(self.programs, self.trained, update, micro_shapes, stage=stage)]
            self._passes[stage] = equal[0]

    @property
    def title(self) -> str:
        """The role's name in logs: policy or critic."""
        return "policy" if self.name == POLICY else self.name

    def __getitem__(self, name: str) -> Callable:
        return self.programs[Key(name, self.layout.split)]

    def freeze(self, base: Params) -> int:
        """Sets the policy that the adapters are added to, in the form of `trained.abstract_frozen`.

        Returns:
          A checksum of its values, the same in bfloat16 and float32.
        """
        self.trained.frozen = base
        return self.transfer.base_checksum(base)

    def update(self, state: TrainState, batch: TrainBatch) -> tuple[TrainState, UpdateResult]:
        """Takes all optimizer steps on one iteration's batch. Processes that own none of the role's
        devices get a result without metrics; `known_to_all` can send it to them. Raises ValueError
        if a column that the loss needs is neither in the batch nor predicted."""
        if is_absent(self.layout.devices):
            return state, UpdateResult({}, (), 0)
        state = self.placement.begun(state)
        update = self.updates[REINFORCED]
        if self.old in update.needs:
            batch = self.predict(state, batch)
        mini_batches = [list(map(update.read, mini)) for mini in batch.mini_batches]
        for micro in chain.from_iterable(mini_batches):
            self._passes[REINFORCED].program(micro)  # compile before the devices are busy
        before = self["copy"](state.params) if self.tells_seen else None
        records = []
        for _ in range(self.num_iterations):
            for mini in mini_batches:
                state, record = self._step(REINFORCED, state, mini)
                records.append(record)
        result = summarized(self.name, update, records, state)
        if before is not None:
            result.metrics["train/update_seen"] = float(self["update_seen"](before, state.params))
        return self.placement.ended(state), result

    def supervised_step(
        self, state: TrainState, micro_batches: Sequence[MicroBatch]
    ) -> tuple[TrainState, UpdateResult]:
        """Takes an optimizer step on demonstrations. The metric `train/cross_entropy` is the mean
        over the tokens of their responses."""
        name = "supervised step"
        devices = self.layout.devices
        if is_absent(devices):
            return state, known_to_all(name, devices, UpdateResult({}, (), 0))
        mini = list(map(self.updates[SUPERVISED].read, micro_batches))
        state, record = self._step(SUPERVISED, self.placement.begun(state), mini)
        state = self.placement.ended(state)
        result = summarized(self.name, self.updates[SUPERVISED], [record], state)
        return state, known_to_all(name, devices, result)

    def untouched(self, state: TrainState) -> UpdateResult:
        """Returns the result of an iteration that does not update this role."""
        return UpdateResult({}, (), 0 if is_absent(self.layout.devices) else int(state.step))

    def predict(self, state: TrainState, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with the model's predictions at each token in the column `self.old`."""
        with fetched(state.params, self.shardings) as params:
            return self._predictions.with_column(batch, self.old, params)

    def _step(
        self, stage: str, state: TrainState, micro_batches: Sequence[MicroBatch]
    ) -> tuple[TrainState, Record]:
        grads = self["zero_gradients"](state.params)
        sums = self._passes[stage].zero_sums()
        for micro in micro_batches:
            micro = with_routes_of(self.policy.config, micro)
            grad_step = self._passes[stage].program(micro)
            grads, sums = grad_step(self.trained.frozen, state.params, micro, grads, sums)
        apply = self[f"{stage}apply"]
        state, grad_norm, is_applied = apply(self.placement.fetched(state), grads)
        return self.placement.rested(state), (sums, grad_norm, is_applied)


def _copy(params: Params) -> Params:
    return jax.tree.map(jnp.copy, params)
