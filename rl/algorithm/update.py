"""The update as pure functions of arrays: gradients, and one optimizer step.

Knows neither the model, which is given as functions, nor shardings and compilation. The caller
compiles the steps ahead of time, with shardings and donation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from pat_jax.common.pytree import pytree_dataclass
from pat_jax.rl.algorithm import balance
from pat_jax.rl.algorithm.losses import Loss, Reduction, Sums
from pat_jax.rl.algorithm.optimizer import in_float32, rounded_like
from pat_jax.rl.algorithm.predict import ModelFunctions, Params, Predictor
from pat_jax.rl.batches.train_batch import SCALE, MicroBatch

_SEED = 0xB16  # seed for rounding weights; rounding of moments has another, for other draws


@pytree_dataclass
class TrainState:
    """The state that an optimizer step changes."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]  # number of optimizer steps applied, without skipped ones


@dataclass(frozen=True)
class Update:
    """The predictions, the loss and the optimizer of an update; its methods are the programs.

    A mini-batch runs `grad_step` for each of its micro-batches, starting from `zero_gradients` and
    `zero_sums`, then `apply_step`. `grad_step` may donate `grads` and `sums`, `apply_step` may
    donate the state.
    """

    predictor: Predictor
    optimizer: optax.GradientTransformation
    loss: Loss
    router_aux_loss_coef: float = 0.0  # weight of `balance.switch_loss`
    is_mean: bool = True  # whether the weights of each mini-batch add up to 1; see `SCALE`

    @property
    def _model(self) -> ModelFunctions:
        return self.predictor.model

    @property
    def _is_balanced(self) -> bool:
        return self._model.routers is not None and self.router_aux_loss_coef > 0

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the per-token columns that an update reads."""
        is_scaled = self._is_balanced and not self.is_mean
        return (*self.loss.needs, SCALE) if is_scaled else self.loss.needs

    def read(self, micro: MicroBatch) -> MicroBatch:
        """Returns the micro-batch with only the columns that an update reads. Raises ValueError if
        one of them is missing."""
        own = {SCALE: micro.columns[SCALE]} if SCALE in self.needs else {}
        teacher = micro.teacher if self.loss.teacher_top_k else None
        return replace(micro, columns=self.loss.read(micro.columns) | own, teacher=teacher)

    def has_passes_of(self, other: "Update") -> bool:
        """Whether this update and `other` differ only in the optimizer. They then share the
        compiled forward and backward passes."""
        return self == replace(other, optimizer=self.optimizer)

    def init(self, params: Params) -> TrainState:
        state = self.optimizer.init(in_float32(params))
        return TrainState(params, state, jnp.zeros((), jnp.int32))

    def grad_step(
        self, params: Params, micro: MicroBatch, grads: Params, sums: Sums
    ) -> tuple[Params, Sums]:
        """Returns `grads` (float32) plus the micro-batch's gradients, and `sums` plus its metrics.
        Raises ValueError if the micro-batch lacks a column that the loss needs."""

        def loss(params: Params) -> tuple[Float[Array, ""], Sums]:
            predicted, beside = self.predictor(
                params, micro, has_entropy_gradient=self.loss.has_entropy_gradient
            )
            value, sums = self.loss(predicted, micro.columns, micro.weights, micro.responses)
            if self._is_balanced:
                # A micro-batch counts by its share of the mini-batch's weights; shares sum to 1.
                share = jnp.sum(micro.weights * micro.columns.get(SCALE, 1.0))
                value += self.router_aux_loss_coef * share * balance.switch_loss(beside)
            more = {name: jnp.sum(micro.weights * beside[name]) for name in self._model.beside}
            of_routers = {name: beside[name] for name in self._zero_of_routers()}
            return value, sums | jax.lax.stop_gradient(more | of_routers)

        # With respect to float32 weights, even if they are kept in bfloat16: else gradients would
        # be summed in bfloat16 over an embedding's tokens and over chunks of logits.
        micro_grads, micro_sums = jax.grad(loss, has_aux=True)(in_float32(params))
        return jax.tree.map(jnp.add, grads, micro_grads), self.add_sums(sums, micro_sums)

    def zero_sums(self) -> Sums:
        """Returns the sums before any micro-batch, for the metrics of the loss and the model."""
        more = {name: jnp.zeros(()) for name in self._model.beside}
        return self.loss.zero_sums() | more | self._zero_of_routers()

    def _zero_of_routers(self) -> Sums:
        if self._model.routers is None:
            return {}
        layers, experts = self._model.routers
        return balance.zero_sums(layers, experts)

    def add_sums(self, sums: Sums, other: Sums) -> Sums:
        joined = self.loss.add(sums, other)
        return joined | {name: sums[name] + other[name] for name in sums if name not in joined}

    def summary(self, steps: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
        """Returns metrics over optimizer steps from each step's sums; NaN if no step has a token in
        the loss. Runs on the host."""
        weights = [float(sums["weight"]) for sums in steps]
        more = {
            name: Reduction.MEAN.of_steps([float(sums[name]) for sums in steps], weights)
            for name in self._model.beside
        }
        of_routers = balance.summary(steps) if self._model.routers else {}
        return self.loss.summary(steps) | more | of_routers

    def apply_step(
        self, state: TrainState, grads: Params
    ) -> tuple[TrainState, Float[Array, ""], Bool[Array, ""]]:
        """Takes one optimizer step, or none if a gradient is not finite. Returns the new state, the
        gradient's global norm before clipping, and whether the step was taken.

        The step is computed in float32. Weights that are kept in bfloat16 are rounded
        stochastically (`optimizer.py`). A step of AdamW is about the learning rate, mostly less
        than half of a weight's last bit: rounding to nearest would drop it.
        """
        grad_norm = optax.tree.norm(grads)
        is_applied = jnp.isfinite(grad_norm)
        params = in_float32(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, params)
        key = jax.random.fold_in(jax.random.key(_SEED), state.step)
        params = rounded_like(state.params, optax.apply_updates(params, updates), key)
        updated = TrainState(params, opt_state, state.step + 1)
        # A select, not a cond: both states have the same buffers, so donation still works.
        state = jax.tree.map(lambda new, old: jnp.where(is_applied, new, old), updated, state)
        return state, grad_norm, is_applied


def zero_gradients(params: Params) -> Params:
    """Returns float32 zeros in the shapes of the parameters, whatever dtype these have."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
