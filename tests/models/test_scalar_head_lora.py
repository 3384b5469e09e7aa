"""Adapters of a model with a scalar head, which is trained as a whole beside them, as in PEFT."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from safetensors.numpy import load_file, save_file

from pat_jax.common.errors import UserError
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.adapted_weight import AdaptedWeight
from pat_jax.models.checkpoints.peft_adapter import (
    ADAPTER_FILE,
    export_adapter,
    load_adapter,
    read_adapter,
)
from pat_jax.models.checkpoints.peft_config import ADAPTER_CONFIG
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.models.transformer import values
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.update_result import update_seen

TINY = replace(preset("tiny", vocab_size=61), num_layers=1, head="scalar", head_bias=True)
CRITIC = Policy.from_config(TINY)
REWARD = Policy.from_config(replace(TINY, head_bias=False))
GENERATES = Policy.from_config(replace(preset("tiny", vocab_size=61), num_layers=1))
HEAD = ("base_model.model.score.weight", "base_model.model.score.bias")


def lora_of(policy: Policy) -> Lora:
    return Lora.of(policy, rank=4, alpha=8.0, targets=["q_proj", "o_proj"])


def numbered(tree: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32), tree)


def computed(policy: Policy, params: Any) -> np.ndarray:
    tokens = jnp.arange(24).reshape(2, 12)
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)
    model: Any = policy.bind(params)
    return np.asarray(values(model.scalar_head, model(tokens, positions).hidden))


@pytest.mark.parametrize("policy", [CRITIC, REWARD], ids=["critic", "reward"])
def test_the_head_is_the_trained_one(policy: Policy):
    """All values are those of the base with adapters under a head of other numbers."""
    lora, base = lora_of(policy), numbered(policy.abstract_params)
    learned = numbered(lora.abstract_params, seed=1)
    assert {name for name in learned if name not in lora.modules} == (
        {"score", "score.bias"} if policy is CRITIC else {"score"}
    )
    whole: Any = lora.attach(base, learned)
    model: Any = policy.bind(whole)
    assert isinstance(whole["layers"][0]["attention"]["query"].get_value(), AdaptedWeight)
    weights, bias = model.scalar_head
    assert_same_bits(weights, learned["score"])
    assert bias is None or np.array_equal(bias, learned["score.bias"])
    merged = computed(policy, lora.merge(base, learned))
    np.testing.assert_allclose(computed(policy, whole), merged, atol=1e-5)
    other = learned | {"score": 2 * learned["score"]}
    without = 0 if bias is None else float(bias[0])
    np.testing.assert_allclose(
        computed(policy, lora.merge(base, other)) - without, 2 * (merged - without), atol=1e-5
    )


def test_every_number_that_is_trained_counts_and_has_a_factor():
    lora, plain = lora_of(CRITIC), lora_of(GENERATES)
    assert lora.num_weights == plain.num_weights + TINY.embed_dim + 1
    base = numbered(CRITIC.abstract_params)
    learned = numbered(lora.abstract_params)
    beside, factors = lora.beside_each(base, learned), lora.factors
    assert jax.tree.structure(beside) == jax.tree.structure(factors)
    scaled = jax.tree.map(lambda x, factor: factor * x, beside, factors)
    assert_same_bits(scaled, lora.attach(base, learned))


def test_a_head_does_not_move_what_the_rollout_sees():
    lora = lora_of(CRITIC)
    before, now = numbered(lora.abstract_params), numbered(lora.abstract_params, seed=1)
    seen = update_seen(before, now, scale=2.0, dtype=jnp.bfloat16)
    other = now | {"score": 9 * now["score"]}
    assert 0.9 < seen < 1.1
    assert seen == update_seen(before, other, scale=2.0, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    "dtype",
    [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def test_new_adapters_have_the_head_of_their_base(dtype: Any):
    """In every layout, float32, in buffers of its own; zeros without a base."""
    chain, _ = layout_chain(factored_mesh(jax.devices()), TINY)
    lora = lora_of(CRITIC)
    for layout in chain.values():
        trained = TrainableParams(CRITIC, layout, lora, dtype)
        new = trained.init(3)
        assert not np.any(new["score"]) and new["score"].sharding == trained.shardings["score"]
        base = jax.tree.map(
            lambda x, at: jax.device_put(x.astype(dtype), at),
            numbered(CRITIC.abstract_params),
            trained.base_shardings,
        )
        trained.frozen = base
        found = trained.init(3)
        assert_same_bits(
            {name: found[name] for name in ("score", "score.bias")},
            {
                "score": base["score"][...].astype(jnp.float32),
                "score.bias": base["score_bias"][...].astype(jnp.float32),
            },
        )
        assert_same_bits({x: found[x] for x in lora.modules}, {x: new[x] for x in lora.modules})
        for x, like in zip(jax.tree.leaves(found), jax.tree.leaves(trained.abstract), strict=True):
            assert (x.sharding, x.dtype) == (like.sharding, like.dtype)
        found["score"].delete()
        assert not base["score"][...].is_deleted()


@pytest.mark.parametrize(
    "policy, task, names", [(CRITIC, "TOKEN_CLS", HEAD), (REWARD, "SEQ_CLS", HEAD[:1])]
)
def test_what_was_written_is_read(tmp_path, policy: Policy, task: str, names: tuple[str, ...]):
    lora = lora_of(policy)
    learned = numbered(lora.abstract_params)
    export_adapter(tmp_path / "adapter", lora, learned, tmp_path / "base")
    fields = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert (fields["task_type"], fields["modules_to_save"]) == (task, ["classifier", "score"])
    stored = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    assert {name for name in stored if "lora" not in name} == {*names}
    assert read_adapter(tmp_path / "adapter", policy) == lora
    assert_same_bits(load_adapter(tmp_path / "adapter", lora), learned)


def replace_head(directory: Path, weights: np.ndarray) -> None:
    tensors = load_file(directory / ADAPTER_FILE) | {HEAD[0]: weights}
    save_file(tensors, directory / ADAPTER_FILE)


def refusal(directory: Path, policy: Policy) -> str:
    with pytest.raises(UserError) as caught:
        read_adapter(directory, policy)
    message = str(caught.value).replace(str(directory), "DIR")
    assert "\n" not in message and ". " not in message.removesuffix("."), "one sentence"
    return message


def test_adapters_with_another_head_are_refused(tmp_path: Path):
    for name, policy in {"critic": CRITIC, "reward": REWARD, "policy": GENERATES}.items():
        lora = lora_of(policy)
        export_adapter(tmp_path / name, lora, lora.init(0), tmp_path / "base")
    assert "field 'modules_to_save' is ['classifier', 'score'], expected null" in refusal(
        tmp_path / "critic", GENERATES
    )
    missing = (
        "DIR/adapter_model.safetensors: tensor '{}' is missing, expected the model's scalar head; "
    )
    saved = "save the adapter with task_type '{}'."
    assert refusal(tmp_path / "policy", REWARD) == (missing + saved).format(HEAD[0], "SEQ_CLS")
    assert refusal(tmp_path / "reward", CRITIC) == (missing + saved).format(HEAD[1], "TOKEN_CLS")
    replace_head(tmp_path / "reward", np.ones((1, 7), np.float32))
    assert f"'{HEAD[0]}' is (1, 7), (1, 32) by the model" in refusal(tmp_path / "reward", REWARD)
    path = tmp_path / "critic" / ADAPTER_CONFIG
    fields = json.loads(path.read_text()) | {"modules_to_save": ["score", "embed_tokens"]}
    path.write_text(json.dumps(fields))
    assert "'modules_to_save' is ['score', 'embed_tokens']" in refusal(tmp_path / "critic", CRITIC)
    replace_head(tmp_path / "reward", np.full((1, 32), np.nan, np.float32))
    with pytest.raises(UserError, match="not finite"):
        load_adapter(tmp_path / "reward", lora_of(REWARD))
