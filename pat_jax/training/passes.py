"""The gradients of an update over its micro-batches, as compiled programs.

Knows shapes of micro-batches. Does not know optimizers, nor which passes make an update
(`trainer.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int16

from pat_jax.common.pytree import with_sharding
from pat_jax.layout.exchange import most_exchanged
from pat_jax.layout.layout import Layout, of_one_group
from pat_jax.layout.partitions import AutoPartition
from pat_jax.models.experts import NO_TOKEN, ROUTE_DTYPE, Routed
from pat_jax.models.policy import Params, Policy
from pat_jax.models.transformer import values
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.rl.algorithm import balance
from pat_jax.rl.algorithm.losses import Sums
from pat_jax.rl.algorithm.predict import ModelFunctions
from pat_jax.rl.algorithm.update import Update
from pat_jax.rl.batches.train_batch import MicroBatch, abstract_micro_batch
from pat_jax.training.trainable_params import TrainableParams

ROUTE_FLIPS = "route_flips"  # share of a token's recorded experts that routers now would not choose


def model_functions(
    policy: Policy,
    layout: Layout,
    dtype: jnp.dtype,
    *,
    remat: str = "full",
    scan_layers: bool = False,
    router_replay: bool = True,
    experts: str = "gathered",
) -> ModelFunctions:
    """Returns the policy's functions in this layout, computed in `dtype`.

    Args:
      router_replay: whether each token goes to the experts that the rollout recorded, if any.
      experts: value of the option `--experts`.
    """
    how: Any = {"remat": remat, "scan_layers": scan_layers}
    experts_how: Any = {"router_replay": router_replay, "experts": experts}
    forward = _forward(policy, layout, dtype, how, **experts_how)

    def head(params: Params) -> Any:
        model = policy.bind(params)
        return model.scalar_head if is_scalar else model.head

    config = policy.config
    is_scalar = config.head == "scalar"
    # The rollout records the policy's experts only, so a critic has no route flips.
    beside = (ROUTE_FLIPS,) if config.experts and not is_scalar else ()
    routers = (len(config.sparse_layers), config.experts.num_experts) if config.experts else None
    of_scalar = values if is_scalar else None
    by_rows = AutoPartition(layout).by_rows
    of_group = None
    if layout.group_axes:
        of_group = model_functions(policy, of_one_group(layout), dtype, **how, **experts_how)
    return ModelFunctions(forward, head, of_scalar, by_rows, beside, routers, of_group)


def _forward(
    policy: Policy,
    layout: Layout,
    dtype: jnp.dtype,
    how: Mapping[str, Any],
    *,
    router_replay: bool,
    experts: str,
) -> Callable[[Params, Array, Array, Array | None], tuple[Array, dict[str, Array]]]:
    """Returns a function that computes the last hidden states and, if experts are recorded, sums
    over tokens of what the routers chose. `how` has options of the layers."""
    config = policy.config.experts
    most = most_exchanged(experts, config, layout, layout.platform)

    def forward(
        params: Params, tokens: Array, positions: Array, routes: Array | None
    ) -> tuple[Array, dict[str, Array]]:
        if config:
            tokens = jnp.where(_is_real(positions), tokens, NO_TOKEN)
        hidden, _, routed = policy.bind(params)(
            tokens,
            positions,
            recorded=routes if router_replay else None,
            partition=AutoPartition(layout, exchanges=tokens.size // layout.split.dp <= most),
            dtype=dtype,
            **how,
        )
        if routes is None:
            return hidden, {}
        return hidden, {ROUTE_FLIPS: _flips(routes, routed.experts), **_sums(routed, positions)}

    return forward


def _is_real(positions: Int[Array, "rows length"]) -> Bool[Array, "rows length"]:
    """Whether a token belongs to an example and is not padding of the row."""
    behind = jnp.pad(positions[:, 1:], ((0, 0), (0, 1)))
    return (positions > 0) | (behind > 0)


def _sums(routed: Routed, positions: Array) -> dict[str, Array]:
    """Returns the routers' sums over a micro-batch's tokens, by the names in `balance.py`."""
    return {
        balance.TOKENS: jnp.sum(_is_real(positions).astype(jnp.float32)),
        balance.LOAD: routed.load,
        balance.PROBABILITY: routed.probability,
        balance.ENTROPY: routed.entropy,
    }


def _flips(
    recorded: Int16[Array, "rows length layers k"], chosen: Int16[Array, "rows length layers k"]
) -> Float[Array, "rows length"]:
    """Returns the share of each token's recorded experts that routers now would not choose."""
    is_chosen = (recorded[..., None] == chosen[..., None, :]).any(axis=-1)
    return jnp.mean((recorded >= 0) & ~is_chosen, axis=(2, 3))


def abstract_micro(
    policy: Policy,
    layout: Layout,
    shape: tuple[int, int],
    columns: Sequence[str],
    teacher_top_k: int = 0,
) -> MicroBatch:
    """Returns shapes with shardings of a micro-batch."""
    micro = abstract_micro_batch(shape, columns, teacher_top_k)
    if policy.config.experts:
        routes: Any = jax.ShapeDtypeStruct((*shape, *policy.config.routes_shape), ROUTE_DTYPE)
        micro = replace(micro, routes=routes)
    return with_sharding(micro, layout.sharding("batch", role="train"))


class Passes:
    """The compiled forward and backward passes of an update, one for each micro-batch shape."""

    def __init__(
        self,
        table: ProgramTable,
        trained: TrainableParams,
        update: Update,
        micro_shapes: Sequence[tuple[int, int]],
        *,
        stage: str,
    ):
        """Declares the programs.

        Args:
          stage: prefix of the programs' names.
        """
        self.update = update
        self._table = table
        self._trained = trained
        self._stage = stage
        layout = trained.layout
        self._everywhere = layout.sharding()
        self._split = layout.split
        zeros = update.zero_sums
        table.declare(Key(f"{stage}zero_sums", self._split), zeros, out_shardings=self._everywhere)
        for shape in micro_shapes:
            self._declare_gradients(shape)

    def _declare_gradients(self, shape: tuple[int, int]) -> None:
        trained = self._trained
        update = self.update
        predictor = update.predictor
        gradients = trained.gradients
        if gradients.groups:
            predictor = replace(predictor, model=predictor.model.of_one_group)

        def grad_step(
            frozen: Params, params: Params, micro: MicroBatch, grads: Params, sums: Sums
        ) -> tuple[Params, Sums]:
            over = replace(update, predictor=trained.over(frozen, predictor))
            return gradients.grad_step(over, params, micro, grads, sums)

        sums = jax.eval_shape(update.zero_sums)
        needs = update.needs
        top_k = update.loss.teacher_top_k
        self._table.declare(
            Key(f"{self._stage}grad", self._split, *shape),
            grad_step,
            trained.abstract_frozen,
            trained.abstract,
            abstract_micro(trained.policy, trained.layout, shape, needs, top_k),
            trained.abstract_gradients,
            with_sharding(sums, self._everywhere),
            out_shardings=(gradients.shardings, self._everywhere),
            donate_argnums=(3, 4),
        )

    def zero_sums(self) -> Sums:
        return self._table[Key(f"{self._stage}zero_sums", self._split)]()

    def program(self, micro: MicroBatch) -> Callable:
        """Returns the program `grad` for a micro-batch of this shape."""
        return self._table[Key(f"{self._stage}grad", self._split, *micro.tokens.shape)]
