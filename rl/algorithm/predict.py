"""A model's predictions at each token, as pure functions of arrays.

Knows neither the model, which is given as functions, nor shardings and compilation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pat_jax.rl.algorithm.logprobs import token_logprobs, top_token_logprobs
from pat_jax.rl.algorithm.losses import (
    ENTROPY,
    LOGPROBS,
    TEACHER_KL,
    VALUES,
    Columns,
    PerToken,
)
from pat_jax.rl.batches.train_batch import MicroBatch, TopTokens, next_tokens

Params = Any  # a pytree of float32 or bfloat16 arrays


@dataclass(frozen=True)
class ModelFunctions:
    """The functions of a model that predictions and updates need."""

    # (params, tokens[rows, length], positions, `MicroBatch.routes`) -> hidden states and, if there
    # are routes, by name: each metric in `beside` at each token, and the sums of `balance.py`
    forward: Callable[[Params, Array, Array, Array | None], tuple[Array, dict[str, Array]]]
    # Returns the head's weights: over the vocabulary [vocab, embed], or those that `values` takes.
    head: Callable[[Params], Any]
    # (a scalar head, hidden states) -> its number at each token; None for a head over a vocabulary
    values: Callable[[Any, Array], Array] | None = None
    # (function, head, arrays of rows) -> function(head, arrays), applied to each shard of rows
    by_rows: Callable[..., Any] = lambda function, *given: function(*given)
    beside: tuple[str, ...] = ()  # metrics from `forward`, averaged over the tokens in the loss
    routers: tuple[int, int] | None = None  # (layers with a router, experts of each)
    # The same functions for the rows of one FSDP group, or None if there is only one group.
    of_one_group: "ModelFunctions | None" = None


@dataclass(frozen=True)
class Predictor:
    """Computes a model's predictions at each token: log-probabilities, or the values of a scalar
    head."""

    model: ModelFunctions
    vocab_size: int  # size of the vocabulary without padding
    temperature: float = 1.0  # the rollout's temperature, so that both use the same distribution
    logit_tokens: int = 4096  # tokens of a data-parallel part for which logits exist at a time

    def predict_step(self, params: Params, micro: MicroBatch) -> Columns:
        """Returns the model's predictions at each token, 0 outside `micro.mask`."""
        predicted, _ = self(params, micro)
        return jax.tree.map(lambda x: jnp.where(micro.mask, x, 0.0), predicted)

    def top_step(self, params: Params, micro: MicroBatch, k: int) -> TopTokens:
        """Returns the k likeliest tokens at each position, for a policy that learns from them."""
        hidden, _ = self.model.forward(params, micro.tokens, micro.positions, micro.routes)

        def of_rows(head: Any, hidden: Array) -> TopTokens:
            return top_token_logprobs(hidden, head, k, **self._how(hidden, self.temperature))

        return self.model.by_rows(of_rows, self.model.head(params), hidden)

    def score_step(self, params: Params, tokens: Int[Array, "rows length"]) -> PerToken:
        """Returns log π(next token) in nats at temperature 1; the last position has no meaning."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        hidden, _ = self.model.forward(params, tokens, positions, None)
        return self._logprobs(params, hidden, next_tokens(tokens), 1.0)[0]

    def __call__(
        self, params: Params, micro: MicroBatch, *, has_entropy_gradient: bool = False
    ) -> tuple[Columns, dict[str, Array]]:
        """Returns the model's predictions at each token, by the names in `losses.PREDICTED`, and
        the numbers that `ModelFunctions.forward` returns in addition to hidden states."""
        hidden, beside = self.model.forward(params, micro.tokens, micro.positions, micro.routes)
        if self.model.values:
            return {VALUES: self.model.values(self.model.head(params), hidden)}, beside
        found = self._logprobs(
            params,
            hidden,
            micro.targets,
            self.temperature,
            has_entropy_gradient=has_entropy_gradient,
            teacher=micro.teacher,
        )
        names = (LOGPROBS, ENTROPY, TEACHER_KL)[: len(found)]
        return dict(zip(names, found, strict=True)), beside

    def _logprobs(
        self,
        params: Params,
        hidden: Array,
        targets: Array,
        temperature: float,
        *,
        has_entropy_gradient: bool = False,
        teacher: TopTokens | None = None,
    ) -> tuple[PerToken, ...]:
        # `by_rows` gathers the head once for all chunks of a shard, and sums its gradient over
        # shards once. If the compiler splits the loop over chunks, it does both in each chunk.
        def of_rows(
            head: Any, hidden: Array, targets: Array, teacher: TopTokens | None
        ) -> tuple[PerToken, ...]:
            return token_logprobs(
                hidden,
                targets,
                head,
                **self._how(hidden, temperature),
                has_entropy_gradient=has_entropy_gradient,
                teacher=teacher,
            )

        return self.model.by_rows(of_rows, self.model.head(params), hidden, targets, teacher)

    def _how(self, hidden: Array, temperature: float) -> dict[str, Any]:
        chunk = max(1, self.logit_tokens // hidden.shape[0])
        return {"vocab_size": self.vocab_size, "temperature": temperature, "chunk": chunk}
