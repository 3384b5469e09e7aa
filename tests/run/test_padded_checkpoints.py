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

from pat_jax.layout.mesh import padded_for
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.orbax_io import read_part
from pat_jax.run.logging.metrics import read_metrics

CONFIG = ModelConfig("qwen2", 61, 24, 48, 1, 9, 3, 4, attention_bias=True, vocab_multiple=8)
# What random weights write differs by it, so that a run learns.
REWARD = """
def score(prompts, completions, **columns):
    return [float(sum(map(ord, text)) % 2) for text in completions]
"""
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


@pytest.mark.parametrize("saved, wanted", [(4, 1), (2, 3)])
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
        a, b = (np.atleast_1d(x)[: CONFIG.vocab_size] for x in (ours, theirs))
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow  # whole commands
@pytest.mark.parametrize("lora", [[], ["--lora.rank", "2"]], ids=["whole", "adapters"])
def test_a_run_goes_on_where_other_heads_are_padded(tmp_path: Path, lora: list[str]):
    config = replace(QWEN3, num_layers=1, num_heads=14, num_kv_heads=2)
    base, problems = tmp_path / "base", write_problems(tmp_path / "sums.jsonl")
    reward, plain = tmp_path / "reward.py", Policy.from_config(config)
    reward.write_text(REWARD)
    write_checkpoint(base, config)
    options = [
        *SMALL_ROLLOUT, "--model", str(base), "--data", str(problems), *lora,
        *("--rollout.max_prompt_length", "128", "--rollout.prompts_per_step", "6"),
        *("--optimizer.learning_rate", "1e-2", "--algorithm.mini_batch_size", "6"),
        *("--reward", f"{reward}:score", "--eval.every", "0"),
    ]  # fmt: skip

    def exported(folder: Path, devices: int, *more: str) -> list[jax.Array]:
        export = tmp_path / f"export{devices}"
        where = ["--devices", str(devices), "--layout", f"dp1tp{devices}"]
        run("--run_dir", str(folder), *where, "--checkpoint.export_dir", str(export), *more)
        return jax.tree.leaves(load_params(export, plain, None, jnp.float32))

    wanted = exported(tmp_path / "2", 2, *options)
    begun = jax.tree.leaves(load_params(base, plain, None, jnp.float32))
    assert any((ours != before).any() for ours, before in zip(wanted, begun, strict=True))
    for devices, num_heads in ((2, 14), (3, 18), (4, 16)):
        padded = padded_for(jax.devices()[:devices], config, [devices])
        assert padded.padded_num_heads == num_heads
        if devices > 2:
            folder = shutil.copytree(tmp_path / "2", tmp_path / str(devices))
            without_learning = ["--steps", "3", "--optimizer.learning_rate", "0"]
            without_learning += ["--rollout.check_integrity", "true"]
            without_learning += ["--reward", f"{reward}:score"]  # never taken from a folder
            found = exported(folder, devices, "--resume", *without_learning)
            row = read_metrics(folder / "metrics.jsonl")[-1]
            assert row["step"] == 3 and row["train/transfer_gap"] < 1e-4
            for ours, theirs in zip(found, wanted, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-7)
