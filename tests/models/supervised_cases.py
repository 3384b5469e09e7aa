"""Examples, packed and not, and what our update makes of them by the names of a checkpoint."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.supervised import CrossEntropy, to_example_batch
from pat_jax.rl.algorithm.update import Update, zero_gradients
from pat_jax.rl.batches.packing import shapes
from pat_jax.rl.batches.train_batch import MicroBatch
from pat_jax.rl.data.examples import Example
from pat_jax.training.passes import model_functions

SHAPES = shapes((16, 32), budget=64, row_multiple=1)


class Learned(NamedTuple):
    loss: float
    gradients: dict[str, np.ndarray]  # by the names of the checkpoint


def make_examples(count: int = 7, vocab_size: int = 61, seed: int = 0) -> list[Example]:
    """Several turns each: what is learned lies in several places."""
    rng = np.random.default_rng(seed)
    examples = []
    for length in rng.integers(5, 33, count):
        in_loss = rng.random(length) < 0.5
        in_loss[0], in_loss[-1] = False, True
        examples.append(Example(rng.integers(0, vocab_size, length, np.int32), in_loss))
    return examples


def packed(examples: list[Example]) -> list[MicroBatch]:
    (mini,) = to_example_batch(examples, SHAPES).mini_batches
    assert len(mini) > 1 and max(micro.responses.max() for micro in mini) > 1
    return list(mini)


def learned(directory: Path, micro_batches: list[MicroBatch], work: Path) -> Learned:
    """Loss and gradients of the checkpoint's policy; `work` is a folder to write in."""
    config = check_checkpoint(directory)
    policy = Policy.from_config(config)
    params = load_params(directory, policy, None, jnp.float32)
    chain, _ = layout_chain(factored_mesh(jax.devices()[:1]), config)
    (layout,) = chain.values()
    model = model_functions(policy, layout, jnp.float32)
    update = Update(Predictor(model, config.vocab_size), optax.sgd(1.0), CrossEntropy())
    step = jax.jit(update.grad_step)
    grads, sums = zero_gradients(params), update.zero_sums()
    for micro in micro_batches:
        grads, sums = step(params, micro, grads, sums)
    export(work / "gradients", policy, grads, jnp.float32)
    return Learned(float(sums["loss"]), load_file(work / "gradients" / "model.safetensors"))
