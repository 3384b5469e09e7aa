"""The update as pure functions of arrays: predictions, gradients, one optimizer step.

Knows neither the model, which comes as functions, nor how anything is sharded or compiled. The
caller compiles the steps ahead of time, with shardings and donation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from pat_jax.common.pytree import pytree_dataclass
from pat_jax.rl.algorithm import balance
from pat_jax.rl.algorithm.logprobs import next_tokens, token_logprobs
from pat_jax.rl.algorithm.losses import (
    ENTROPY,
    LOGPROBS,
    VALUES,
    Columns,
    Loss,
    PerToken,
    Reduction,
    Sums,
)
from pat_jax.rl.algorithm.low_precision import in_float32, rounded_like
from pat_jax.rl.batches.batches import MicroBatch

Params = Any  # a pytree of float32 or bfloat16 arrays, the master weights

_SEED = 0xB16  # of the rounding of weights; with that of moments, the draws would be the same


@dataclass(frozen=True)
class ModelFunctions:
    """A model as the functions that an update needs."""

    # (params, tokens[rows, length], positions, `MicroBatch.routes`) -> hidden states and, with
    # routes, a number of each token for each name in `beside`, and the sums of `balance.py`
    forward: Callable[[Params, Array, Array, Array | None], tuple[Array, dict[str, Array]]]
    # (head, hidden states) -> logits, padding included; of a scalar head, a number of each token
    logits: Callable[[Any, Array], Array]
    # The part of the parameters that `logits` is given.
    head: Callable[[Params], Any] = lambda params: params
    # (function, head, arrays of rows) -> function(head, arrays), applied to each shard of rows
    by_rows: Callable[..., tuple[PerToken, PerToken]] = lambda function, *given: function(*given)
    beside: tuple[str, ...] = ()  # metrics, each a mean over the tokens in the loss
    routers: tuple[int, int] | None = None  # number of layers with a router, and experts of each
    is_scalar: bool = False  # whether the head gives one number at each token


@pytree_dataclass
class TrainState:
    """All that an optimizer step changes."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]  # updates applied; skipped ones do not count


@dataclass(frozen=True)
class Update:
    """The model, the loss and the optimizer of an update; its methods are the programs.

    A mini-batch runs `grad_step` for each of its micro-batches, starting from `zero_gradients` and
    `zero_sums`, then `apply_step`. `grad_step` may donate `grads` and `sums`, `apply_step` may
    donate the state.
    """

    model: ModelFunctions
    optimizer: optax.GradientTransformation
    vocab_size: int  # without padding
    loss: Loss
    temperature: float = 1.0  # the rollout's, so that both use the same distribution
    router_aux_loss_coef: float = 0.0  # weight of `balance.switch_loss`
    logit_tokens: int = 4096  # tokens of one shard of rows for which logits exist at a time

    def has_passes_of(self, other: "Update") -> bool:
        """Whether the two differ only in the optimizer: then their passes are the same programs."""
        return self == replace(other, optimizer=self.optimizer)

    def init(self, params: Params) -> TrainState:
        state = self.optimizer.init(in_float32(params))
        return TrainState(params, state, jnp.zeros((), jnp.int32))

    def predict_step(self, params: Params, micro: MicroBatch) -> Columns:
        """Returns what the model predicts at each token (`losses.PREDICTED`), 0 outside
        `micro.mask`."""
        predicted = self._predicted(params, self._forward(params, micro)[0], micro)
        return jax.tree.map(lambda x: jnp.where(micro.mask, x, 0.0), predicted)

    def score_step(self, params: Params, tokens: Int[Array, "rows length"]) -> PerToken:
        """Returns log π(next token) in nats at temperature 1; the last position has no meaning."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        hidden, _ = self.model.forward(params, tokens, positions, None)
        return self._logprobs(params, hidden, next_tokens(tokens), 1.0)[0]

    def grad_step(
        self, params: Params, micro: MicroBatch, grads: Params, sums: Sums
    ) -> tuple[Params, Sums]:
        """Adds the micro-batch's gradient to `grads`, float32, and its metrics to `sums`.

        Raises:
          ValueError: the micro-batch lacks a column that the loss needs.
        """

        def loss(params: Params) -> tuple[Float[Array, ""], Sums]:
            hidden, beside = self._forward(params, micro)
            has_entropy_gradient = self.loss.has_entropy_gradient
            predicted = self._predicted(
                params, hidden, micro, has_entropy_gradient=has_entropy_gradient
            )
            value, sums = self.loss(predicted, micro.columns, micro.weights, micro.responses)
            if self.model.routers and self.router_aux_loss_coef:
                # A micro-batch counts by the weight of its tokens in the loss, all of them by 1.
                share = self.router_aux_loss_coef * jnp.sum(micro.weights)
                value += share * balance.switch_loss(beside)
            more = {name: jnp.sum(micro.weights * beside[name]) for name in self.model.beside}
            of_routers = {name: beside[name] for name in self._zero_of_routers()}
            return value, sums | jax.lax.stop_gradient(more | of_routers)

        # With respect to float32 weights, whatever they are kept in: else gradients of an
        # embedding's tokens, and of chunks of logits, would be summed in bfloat16.
        micro_grads, micro_sums = jax.grad(loss, has_aux=True)(in_float32(params))
        return jax.tree.map(jnp.add, grads, micro_grads), self._add(sums, micro_sums)

    def zero_sums(self) -> Sums:
        """Returns the sums before any micro-batch, for the metrics of the loss and the model."""
        more = {name: jnp.zeros(()) for name in self.model.beside}
        return self.loss.zero_sums() | more | self._zero_of_routers()

    def _zero_of_routers(self) -> Sums:
        return balance.zero_sums(*self.model.routers) if self.model.routers else {}

    def _add(self, sums: Sums, other: Sums) -> Sums:
        joined = self.loss.add(sums, other)
        return joined | {name: sums[name] + other[name] for name in sums if name not in joined}

    def summary(self, steps: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
        """Returns metrics over optimizer steps from each step's sums, on the host.

        They are NaN if no step has a token in the loss."""
        weights = [float(sums["weight"]) for sums in steps]
        more = {
            name: Reduction.MEAN.of_steps([float(sums[name]) for sums in steps], weights)
            for name in self.model.beside
        }
        of_routers = balance.summary(steps) if self.model.routers else {}
        return self.loss.summary(steps) | more | of_routers

    def apply_step(
        self, state: TrainState, grads: Params
    ) -> tuple[TrainState, Float[Array, ""], Bool[Array, ""]]:
        """Takes one optimizer step, or none if a gradient is not finite.

        The step is computed in float32. Weights that are kept in bfloat16 are rounded
        stochastically. A step of AdamW is about the learning rate, mostly less than half of a
        weight's last bit: rounded to nearest, no weight would ever move (`low_precision.py`).

        Returns:
          The new state, the gradient's global norm before clipping, and whether the step was taken.
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

    def _forward(self, params: Params, micro: MicroBatch) -> tuple[Array, dict[str, PerToken]]:
        return self.model.forward(params, micro.tokens, micro.positions, micro.routes)

    def _predicted(
        self, params: Params, hidden: Array, micro: MicroBatch, **options: bool
    ) -> Columns:
        if self.model.is_scalar:
            return {VALUES: self.model.logits(self.model.head(params), hidden)}
        found = self._logprobs(params, hidden, micro.targets, self.temperature, **options)
        return dict(zip((LOGPROBS, ENTROPY), found, strict=True))

    def _logprobs(
        self,
        params: Params,
        hidden: Array,
        targets: Array,
        temperature: float,
        *,
        has_entropy_gradient: bool = False,
    ) -> tuple[PerToken, PerToken]:
        # `by_rows` gathers the head once for all chunks of a shard, and sums its gradient over
        # shards once. If the compiler splits the loop over chunks, it does both in each chunk.
        def of_rows(head: Any, hidden: Array, targets: Array) -> tuple[PerToken, PerToken]:
            return token_logprobs(
                hidden,
                targets,
                lambda hidden: self.model.logits(head, hidden),
                vocab_size=self.vocab_size,
                temperature=temperature,
                chunk=max(1, self.logit_tokens // hidden.shape[0]),
                has_entropy_gradient=has_entropy_gradient,
            )

        return self.model.by_rows(of_rows, self.model.head(params), hidden, targets)


def zero_gradients(params: Params) -> Params:
    """Returns float32 zeros in the shapes of the parameters, whatever dtype these have."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
