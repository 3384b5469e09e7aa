"""What is sent for the logits: the head and its gradient once, whatever the number of chunks."""

import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
import pytest

from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import Update
from pat_jax.training.passes import model_functions
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import Trainer
from pat_jax.training.transfer import Receivers

CONFIG = preset("tiny", vocab_size=1000)  # no other weight has a dimension like it
POLICY = Policy.from_config(CONFIG)

SENDS = re.compile(r" = (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")


def sent(hlo: str) -> Iterator[tuple[bool, str]]:
    """Of each collective: whether it is outside of all loops and calls, and its result's shape."""
    is_entry = False
    for line in hlo.splitlines():
        if line.endswith("{") and "->" in line:
            is_entry = line.startswith("ENTRY")
        elif found := SENDS.search(line):
            yield is_entry, found[1]


@pytest.mark.parametrize(
    "split", [pytest.param(Split(8, 1), marks=pytest.mark.slow), Split(4, 2)], ids=str
)
def test_the_head_is_gathered_once(split: Split):
    layout = layout_chain(factored_mesh(jax.devices()), CONFIG)[0][split]
    model = model_functions(POLICY, layout, jnp.float32)
    predictor = Predictor(model, CONFIG.vocab_size, logit_tokens=16)
    update = Update(predictor, optax.sgd(1.0), PolicyLoss())
    trainer = Trainer(
        TrainableParams(POLICY, layout),
        update,
        Receivers(jnp.float32, {split: layout}),
        micro_shapes=[(8, 64)],
    )
    hlo = trainer.programs.lower(Key("grad", split, 8, 64)).compile().as_text() or ""
    vocab = CONFIG.padded_vocab_size // split.tp
    shape = re.compile(rf"\[(?:{vocab},{CONFIG.embed_dim}|{CONFIG.embed_dim},{vocab})\]")
    heads = [is_entry for is_entry, shapes in sent(hlo) if shape.search(shapes)]
    assert heads and all(heads), heads
    assert "while(" in hlo  # there are several chunks
