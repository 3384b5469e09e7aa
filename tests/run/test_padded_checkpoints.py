"""A checkpoint of arrays that are padded for some devices, restored for others."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import QWEN3, SMALL_ROLLOUT, run, write_checkpoint, write_problems

from pat_jax.common.errors import UserError
from pat_jax.models.config import ModelConfig
from pat_jax.models.hf_load import load_params
from pat_jax.models.policy import Policy
from pat_jax.rl.optimizer import make_optimizer
from pat_jax.rl.update import TrainState
from pat_jax.run.checkpoint import Checkpointer
from pat_jax.run.checkpoint_orbax import read_part
from pat_jax.run.metrics import read_metrics

CONFIG = ModelConfig("qwen2", 61, 24, 48, 1, 9, 3, 4, attention_bias=True, vocab_multiple=8)
OPTIMIZER = make_optimizer(learning_rate=1e-3, total_steps=9)


def state_of(policy: Policy) -> TrainState:
    """Weights, and moments that are twice as large; zeros in what pads heads."""
    params = policy.init(0)
    doubled, structure = jax.tree.map(lambda x: 2 * x, params), jax.tree.structure(params)

    def is_params(x: object) -> bool:
        return jax.tree.structure(x) == structure

    moments = jax.tree.map(
        lambda x: doubled if is_params(x) else x, OPTIMIZER.init(params), is_leaf=is_params
    )
    return TrainState(params, moments, jnp.int32(3))


@pytest.mark.parametrize("saved, wanted", [(4, 1), (1, 4), (4, 2), (2, 3)])
def test_parameters_and_moments_come_back_with_other_padding(
    tmp_path: Path, saved: int, wanted: int
):
    there, here = (
        Policy.from_config(replace(CONFIG, query_multiple=n, vocab_multiple=8 * n))
        for n in (saved, wanted)
    )
    with Checkpointer(tmp_path, 2, fingerprint=asdict(there.config)) as checkpoints:
        checkpoints.save(3, state_of(there), {})
        checkpoints.wait()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    expected = state_of(here)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), expected
    )
    with Checkpointer(tmp_path, 2, fingerprint=asdict(here.config)) as checkpoints:
        _, found, _ = checkpoints.restore(like)
    assert_same_numbers(found, expected)
    part = read_part(tmp_path / "3", {"params": like.params})
    assert_same_numbers(part["params"], expected.params)


def assert_same_numbers(found: Any, expected: Any) -> None:
    """But for rows that pad the vocabulary, the only dimension that is so long."""
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert ours.shape == theirs.shape
        rows = [np.atleast_1d(x)[: CONFIG.vocab_size] for x in (ours, theirs)]
        np.testing.assert_array_equal(*rows)


@pytest.mark.slow  # whole commands
@pytest.mark.parametrize("lora", [[], ["--lora.rank", "2"]], ids=["whole", "adapters"])
def test_a_run_goes_on_where_other_heads_are_padded(tmp_path: Path, lora: list[str]):
    """Nine heads become twelve on two and on four devices, and stay nine on three."""
    config = replace(QWEN3, num_heads=9, num_kv_heads=3)
    base, problems = tmp_path / "base", write_problems(tmp_path / "sums.jsonl")
    write_checkpoint(base, config)
    options = [
        *SMALL_ROLLOUT, "--model", str(base), "--data", str(problems), "--reward", "math", *lora,
        *("--rollout.max_prompt_length", "256", "--rollout.prompts_per_step", "6"),
        *("--optimizer.learning_rate", "1e-2", "--algorithm.mini_batch_size", "6"),
    ]  # fmt: skip
    saved, plain = tmp_path / "saved", Policy.from_config(config)
    assert "9 query heads are padded to 12" in run(*options, "--run_dir", str(saved))
    exports = []
    for devices in (2, 3, 4):
        folder, export = tmp_path / str(devices), tmp_path / f"export{devices}"
        shutil.copytree(saved, folder)
        output = run(
            *("--resume", "--run_dir", str(folder), "--devices", str(devices), "--steps", "3"),
            *("--optimizer.learning_rate", "0", "--checkpoint.export_dir", str(export)),
        )
        assert "resumed after step 2" in output
        assert ("9 query heads are padded to 12" in output) == (devices != 3)
        assert read_metrics(folder / "metrics.jsonl")[-1]["train/transfer_gap"] < 1e-4
        exports.append(load_params(export, plain, None, jnp.float32))
    begun = jax.tree.leaves(load_params(base, plain, None, jnp.float32))
    first, *others = map(jax.tree.leaves, exports)
    assert any((ours != before).any() for ours, before in zip(first, begun, strict=True))
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            np.testing.assert_allclose(theirs, ours, atol=1e-7)


def test_another_number_of_heads_is_another_model(tmp_path: Path):
    with Checkpointer(tmp_path, 2, fingerprint=asdict(CONFIG)) as checkpoints:
        checkpoints.save(1, {"x": jnp.float32(1)}, {})
        checkpoints.wait()
    other = asdict(replace(CONFIG, num_heads=12))
    with (
        Checkpointer(tmp_path, 2, fingerprint=other) as checkpoints,
        pytest.raises(UserError, match=r"num_heads \(9 there, 12 here\)"),
    ):
        checkpoints.restore({"x": jnp.float32(0)})
