"""A small policy's trainers, whose programs are compiled when a test needs them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pat_jax.config.role_table import REFERENCE
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.planning.types import Split
from pat_jax.rl.algorithm.losses import Loss
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import TrainState, Update
from pat_jax.rl.batches.train_batch import MicroBatch, TrainBatch
from pat_jax.training.carrier import Carrier
from pat_jax.training.passes import model_functions
from pat_jax.training.reader import Reader
from pat_jax.training.roles import Roles
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import REINFORCED, Trainer
from pat_jax.training.transfer import Receivers
from pat_jax.training.update_result import UpdateResult

# A layer is enough: compiling takes as long as there are layers, and loops over them have tests of their own.
CONFIG = replace(preset("tiny", vocab_size=61), num_layers=1)
POLICY = Policy.from_config(CONFIG)
CHAIN = {str(k): v for k, v in layout_chain(factored_mesh(jax.devices()), CONFIG)[0].items()}
# Of eight devices, where so many divide the parameters among them, and others have copies.
IN_GROUPS = {
    size: layout_chain(factored_mesh(jax.devices()), CONFIG, fsdp_size=size)[0][Split(8, 1)]
    for size in (1, 2, 4)
}
(SINGLE,) = layout_chain(factored_mesh(jax.devices()[:1]), CONFIG)[0].values()
ROWS, LENGTH = 8, 16
ON_POLICY = PolicyLoss(is_on_policy=True)
ADAM = optax.adam(1e-3)


def make_trainer(
    layout: Layout,
    *,
    dtype: jnp.dtype = jnp.float32,
    weights: WeightFormat = "auto",
    micro_shapes: Sequence[tuple[int, int]] = ((ROWS, LENGTH),),
    loss: Loss = ON_POLICY,
    has_supervised: bool = False,
    lora: Lora | None = None,
    compute_dtype: jnp.dtype = jnp.float32,
    weight_dtype: jnp.dtype = jnp.float32,
    targets: Sequence[Layout] = tuple(CHAIN.values()),
    carriers: Mapping[Split, Carrier] = MappingProxyType({}),
    optimizer: optax.GradientTransformation = ADAM,
    scan_layers: bool = False,
    policy: Policy = POLICY,
    **options: Any,
) -> Trainer:
    """
    Args:
      dtype, weights: of the rollout that it hands its policy to.
      options: others of `Trainer`.
    """
    model = model_functions(policy, layout, jnp.float32, scan_layers=scan_layers)
    kept = policy.with_weights(weights)
    update = Update(Predictor(model, CONFIG.vocab_size), optimizer, loss)
    return Trainer(
        TrainableParams(policy, layout, lora, compute_dtype, weight_dtype),
        update,
        Receivers(
            dtype,
            {target.split: target for target in targets},
            lora.beside(kept) if lora else kept,
            carriers,
        ),
        micro_shapes=micro_shapes,
        supervised=update if has_supervised else None,
        **options,
    )


def with_reference(trainer: Trainer, held: TrainableParams | None = None) -> Roles:
    """The policy's trainer with a reference, whose parameters a test gives.

    Args:
      held: of the reference; None: as the trainer's.
    """
    predictor, shapes = trainer.updates[REINFORCED].predictor, [(ROWS, LENGTH)]
    reader = Reader("reference_logprobs", held or trainer.trained, predictor, shapes)
    return Roles(trainer, {REFERENCE: reader})


def compile_named(trainer: Trainer, *names: str) -> None:
    for key in trainer.programs.missing():
        if key.name in names:
            trainer.programs.compile(key)


@cache
def host_weights() -> Params:
    """Arrays on the host; not to be written to."""
    return weights_of(POLICY)


def weights_of(policy: Policy) -> Params:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: rng.normal(x.ndim == 1, 0.2, x.shape).astype(np.float32), policy.abstract_params
    )


def started(trainer: Trainer, params: Any = None) -> TrainState:
    """From `params` on the host, or from `host_weights`."""
    params = host_weights() if params is None else params
    return trainer["init_state"](jax.device_put(params, trainer.shardings))


def updated(
    trainer: Trainer, state: TrainState, *, steps: int = 1
) -> tuple[TrainState, UpdateResult]:
    """After so many updates by `micro_batches`, and what came of the last."""
    for _ in range(steps):
        state, result = trainer.update(state, made_up_batch())
        assert result.applied == (True,) and result.metrics["train/skipped_updates"] == 0
    assert jax.tree.map(lambda x: x.sharding, state.params) == trainer.shardings
    return state, result


def made_up_batch() -> TrainBatch:
    return TrainBatch([list(micro_batches())], 1.0)


def micro_batches() -> Iterator[MicroBatch]:
    """Two of made-up responses."""
    rng = np.random.default_rng(1)
    for _ in range(2):
        mask = np.arange(LENGTH) < rng.integers(4, LENGTH, ROWS)[:, None]
        yield MicroBatch(
            tokens=rng.integers(0, CONFIG.vocab_size, (ROWS, LENGTH), np.int32),
            positions=np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH)),
            responses=mask.astype(np.int32),
            weights=np.where(mask, 1 / 100, 0).astype(np.float32),
            columns={
                "advantages": np.where(mask, rng.normal(size=(ROWS, 1)), 0).astype(np.float32),
                "behavior_logprobs": np.where(mask, -4, 0).astype(np.float32),
            },
        )
