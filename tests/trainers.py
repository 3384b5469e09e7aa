"""A small policy's trainers, of which a test compiles the programs that it needs."""

from collections.abc import Iterator, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pat_jax.layout.layout import Layout, factored_mesh, layout_chain
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.rl.algorithm.losses import Loss
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.update import PolicyUpdate
from pat_jax.rl.batches.batches import MicroBatch
from pat_jax.training.trainer import Trainer, model_functions

CONFIG = preset("tiny", vocab_size=61)
POLICY = Policy.from_config(CONFIG)
CHAIN = {str(k): v for k, v in layout_chain(factored_mesh(jax.devices()), CONFIG)[0].items()}
ROWS, LENGTH = 8, 16
ON_POLICY = PolicyLoss(is_on_policy=True)
ADAM = optax.adam(1e-3)


def make_trainer(
    layout: Layout,
    *programs: str,
    dtype: jnp.dtype = jnp.float32,
    weights: WeightFormat = "auto",
    micro_shapes: Sequence[tuple[int, int]] = ((ROWS, LENGTH),),
    loss: Loss = ON_POLICY,
    has_supervised: bool = False,
    lora: Lora | None = None,
    base_dtype: jnp.dtype = jnp.float32,
    targets: Sequence[Layout] = tuple(CHAIN.values()),
    optimizer: optax.GradientTransformation = ADAM,
    weight_dtype: jnp.dtype = jnp.float32,
    is_offloaded: bool = False,
    scan_layers: bool = False,
    has_logprobs: bool = False,
    by_need: bool = False,
) -> Trainer:
    """With only the named programs compiled."""
    model = model_functions(POLICY, layout, jnp.float32, scan_layers=scan_layers)
    kept = POLICY.with_weights(weights)
    update = PolicyUpdate(model, optimizer, CONFIG.vocab_size, loss)
    trainer = Trainer(
        POLICY,
        layout,
        update,
        micro_shapes=micro_shapes,
        rollout_layouts={target.split: target for target in targets},
        rollout_dtype=dtype,
        supervised=update if has_supervised else None,
        rollout_policy=lora.beside(kept) if lora else kept,
        lora=lora,
        base_dtype=base_dtype,
        weight_dtype=weight_dtype,
        is_offloaded=is_offloaded,
        has_logprobs=has_logprobs,
    )
    declared = trainer.programs._declared
    for key in [key for key in declared if key.name not in programs]:
        del declared[key]
    trainer.compile(by_need=by_need)
    return trainer


@cache
def host_weights() -> Params:
    """Arrays on the host; not to be written to."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: rng.normal(x.ndim == 1, 0.2, x.shape).astype(np.float32), POLICY.abstract_params
    )


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
