"""The weights of an engine that only generates: those of a run's checkpoint, and those with adapters."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits, assert_same_shards
from runs import QWEN3, write_checkpoint
from saved_runs import learned, policy_of, save_run

from pat_jax.common.errors import UserError
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.checkpoints.peft_adapter import export_adapter
from pat_jax.models.hf_tensors import hf_tensors
from pat_jax.models.lora import Adapters, Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.run.checkpoints.files import MANIFEST
from pat_jax.run.roles.saved_policy import SavedPolicy, find_policy
from pat_jax.run.roles.weights import weights_of_model, weights_of_run

FLOAT32 = jnp.dtype(jnp.float32)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "base"
    return write_checkpoint(folder, replace(QWEN3, num_layers=2))


@pytest.fixture
def lora(base: Path) -> Lora:
    return Lora.of(policy_of(base), rank=3, alpha=7.0, targets=["q_proj", "mlp.down_proj"])


def layouts(policy: Policy, num_devices: int = 4) -> list[Layout]:
    return [*layout_chain(factored_mesh(jax.devices()[:num_devices]), policy.config)[0].values()]


def load(saved: SavedPolicy, base: Path, policy: Policy, layout: Layout, **kept: Any) -> Params:
    whole = policy.with_weights("auto")
    weights = weights_of_run(str(base), saved, whole, layout, 0)
    return weights(kept.get("dtype", FLOAT32), policy, layout)


def merged(base: Path, lora: Lora, adapters: Adapters) -> Params:
    """W + alpha / rank · b · a in float64, by the shapes that checkpoints have."""
    params = load_params(base, lora.policy, None, FLOAT32)

    def add(tensor: Any, weight: jax.Array) -> np.ndarray:
        found = np.asarray(weight, np.float64)
        if tensor.module in adapters:
            a, b = (np.asarray(x, np.float64) for x in jax.tree.leaves(adapters[tensor.module]))
            product = b.reshape(-1, lora.rank) @ a.reshape(lora.rank, -1)
            found = found + lora.alpha / lora.rank * product.reshape(found.shape)
        return found.astype(np.float32)

    return jax.tree.map(add, hf_tensors(lora.policy), params)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [pytest.param(jnp.float32, jnp.bfloat16, marks=pytest.mark.slow), (jnp.bfloat16, jnp.float32)],
)
def test_a_checkpoint_is_on_the_shards_of_every_layout(base, tmp_path, dtype, weight_dtype):
    policy = policy_of(base)
    params = learned(policy.abstract_params, seed=1)
    params = jax.tree.map(lambda x: x.astype(weight_dtype), params)
    save_run(tmp_path, base, params, step=3)
    saved = find_policy(str(tmp_path), None)
    assert (saved.step, saved.model, saved.compute_dtype) == (3, str(base), "float32")
    for layout in layouts(policy):
        found = load(saved, base, policy, layout, dtype=jnp.dtype(dtype))
        expected = jax.tree.map(lambda x: x.astype(dtype), params)
        assert_same_shards(found, jax.device_put(expected, layout.param_shardings(policy)))


@pytest.mark.parametrize(("multiple", "num_devices"), [(7, 1), (384, 4)])
def test_a_vocabulary_padded_for_other_devices_is_padded_for_these(
    base: Path, tmp_path: Path, multiple: int, num_devices: int
):
    params = learned(policy_of(base).abstract_params, seed=1)
    save_run(tmp_path, base, params, step=3)
    vocab = QWEN3.vocab_size
    policy = Policy.from_config(replace(policy_of(base).config, vocab_multiple=multiple))
    found = load(find_policy(str(tmp_path), None), base, policy, layouts(policy, num_devices)[-1])
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        same = min(len(ours), len(theirs))
        assert same == len(theirs) or same >= vocab
        np.testing.assert_array_equal(ours[:same], theirs[:same])
        assert not np.any(ours[same:])
    assert {len(x) for x in jax.tree.leaves(found)} >= {policy.config.padded_vocab_size}


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_a_checkpoint_is_quantized_as_a_directory_is(base: Path, tmp_path, weights: WeightFormat):
    plain = policy_of(base)
    policy, params = plain.with_weights(weights), load_params(base, plain, None, FLOAT32)
    save_run(tmp_path, base, params, step=3)
    layout = layouts(policy, 2)[-1]
    found = load(find_policy(str(tmp_path), None), base, policy, layout)
    shardings = layout.param_shardings(policy)
    assert_same_shards(found, load_params(base, policy, shardings, FLOAT32))


def test_the_adapters_of_a_checkpoint_are_merged(base: Path, tmp_path: Path, lora: Lora):
    adapters = learned(lora.abstract_params, seed=2)
    save_run(tmp_path, base, adapters, step=3, lora=lora)
    expected, saved = merged(base, lora, adapters), find_policy(str(tmp_path), None)
    found = load(saved, base, lora.policy, layouts(lora.policy, 2)[-1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)


def test_adapters_of_another_base_are_refused(base: Path, tmp_path: Path, lora: Lora):
    save_run(tmp_path, base, learned(lora.abstract_params, seed=2), step=3, lora=lora)
    other = write_checkpoint(tmp_path / "other", replace(QWEN3, mlp_dim=40))
    saved = find_policy(str(tmp_path), None)
    with pytest.raises(UserError, match="of another model, which differs in mlp_dim") as error:
        saved.check(policy_of(other).config)
    assert "\n" not in str(error.value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pat_jax.run.roles.weights.load_params", twice)
        with pytest.raises(UserError, match="are of another base, whose weights differ"):
            weights_of_run(str(base), saved, lora.policy, layouts(lora.policy, 1)[0], 0)


def twice(*args: Any) -> Params:
    return jax.tree.map(lambda x: 2 * x, load_params(*args))


def test_an_adapter_directory_is_merged(base: Path, tmp_path: Path, lora: Lora):
    adapters = learned(lora.abstract_params, seed=2)
    export_adapter(tmp_path / "adapter", lora, adapters, base)
    weights = weights_of_model(str(base), lora.policy.config, str(tmp_path / "adapter"), 0)
    layout = layouts(lora.policy, 2)[-1]
    found = weights(FLOAT32, lora.policy, layout)
    expected = merged(base, lora, adapters)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)
    placed = jax.device_put(jax.device_get(found), layout.param_shardings(lora.policy))
    assert_same_shards(found, placed)


def test_an_adapter_of_another_model_or_of_none_is_refused(base: Path, tmp_path: Path, lora: Lora):
    export_adapter(tmp_path / "adapter", lora, lora.init(0), base)
    other = Policy.from_config(replace(lora.policy.config, num_layers=1)).config
    with pytest.raises(UserError, match="is of another model than --model"):
        weights_of_model(str(base), other, str(tmp_path / "adapter"), 0)
    with pytest.raises(UserError, match=r"--adapter is .*: expected none with --model 'tiny'"):
        weights_of_model("tiny", other, str(tmp_path / "adapter"), 0)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def scratch(checkpoint: Path) -> None:
    """One bit of the arrays is another."""
    largest = max(
        (p for p in (checkpoint / "state").rglob("*") if p.is_file()), key=os.path.getsize
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def forget(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    (checkpoint / "meta" / "metadata").write_text("{")


@pytest.fixture(scope="module")
def saved_run(base: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for step in (2, 4, 10):
        save_run(folder, base, learned(policy_of(base).abstract_params, seed=step), step=step)
    return folder


@pytest.fixture
def run_dir(saved_run: Path, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2, 4 and 10."""
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


@pytest.mark.parametrize("damage", [scratch, forget])
def test_the_newest_that_is_whole_is_taken_and_nothing_is_touched(base, run_dir, damage):
    damage(run_dir / "checkpoints" / "10")
    before = contents(run_dir)
    saved = find_policy(str(run_dir), None)
    assert saved.step == 4 and len(saved.damaged) == 1
    assert saved.notes[0].startswith("the checkpoint of step 10 is damaged: ")
    assert saved.notes[1] == f"the policy after step 4 of {run_dir}"
    policy = policy_of(base)
    found = load(saved, base, policy, layouts(policy, 1)[0])
    assert_same_bits(jax.device_get(found), jax.device_get(learned(policy.abstract_params, seed=4)))
    assert contents(run_dir) == before


def test_the_one_that_is_asked_for_is_taken(run_dir: Path):
    saved = find_policy(str(run_dir), 2)
    assert (saved.step, saved.damaged) == (2, [])


def test_what_is_not_there_or_damaged_is_one_sentence(run_dir: Path):
    for step in (2, 4, 10):
        (run_dir / "checkpoints" / str(step) / "meta" / "metadata").write_text(json.dumps([]))
    for folder, step, words in (
        (run_dir, 3, ["option --checkpoint is 3", "which are 2, 4, 10"]),
        (run_dir, 4, ["expected a whole checkpoint, but the checkpoint of step 4 is damaged"]),
        (run_dir, None, ["the checkpoint of step 10 is damaged", "step 2 is damaged"]),
        (run_dir / "checkpoints", None, ["expected the folder of a run", "--model"]),
    ):
        with pytest.raises(UserError) as error:
            find_policy(str(folder), step)
        message = str(error.value)
        assert all(word in message for word in words) and "\n" not in message, message
