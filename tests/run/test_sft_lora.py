"""Supervised fine-tuning of adapters: it learns, compiles nothing on the way, and knows its base."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from arrays import assert_same_bits
from file_runs import made, to_the_end
from runs import write_checkpoint, write_problems
from safetensors.numpy import load_file, save_file

from pat_jax.common.errors import UserError
from pat_jax.models.checkpoints.peft_adapter import load_adapter, read_adapter
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.sft.loop import SftRun
from pat_jax.run.sft.setup import SftSetup


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, list[str], SftSetup]:
    """The folder of a run to the end, its options, and what it was made of."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    base, data = write_checkpoint(folder / "base"), write_problems(folder / "sums.jsonl")
    options = [
        *("--model", str(base), "--data", str(data), "--run_dir", str(folder / "run")),
        *("--data.prompt_key", "question", "--data.completion_key", "answer"),
        *("--devices", "2", "--max_length", "64", "--tokens_per_micro_batch", "256"),
        *("--batch_size", "8", "--steps", "12", "--eval.every", "12", "--eval.share", "0.2"),
        *("--lora.rank", "4", "--optimizer.learning_rate", "3e-2", "--lora.export", "adapter"),
        *("--scan_layers", "true"),
    ]
    setup = made(*options, "--checkpoint.export_dir", str(folder / "adapter"))
    assert to_the_end(setup).compiled == []
    return folder, options, setup


def test_adapters_learn_and_compile_nothing(whole):
    folder, _, _ = whole
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    losses = [row["train/loss"] for row in rows[1:]]
    assert len(losses) == 12 and losses[-1] < 0.9 * losses[0]


def test_the_export_is_the_adapters_of_the_checkpoint(whole):
    folder, _, setup = whole
    lora = setup.trainer.trained.lora
    with Checkpointer(folder / "run" / CHECKPOINTS, fingerprint=setup.fingerprint) as checkpoints:
        step, state, _ = checkpoints.restore({"train": setup.trainer.abstract_state})
    params = jax.device_get(state["train"].params)
    assert step == 12 and lora and set(params) == set(lora.modules)
    assert all(np.any(adapter.b) for adapter in params.values())
    known = read_adapter(folder / "adapter", setup.policy)
    assert (known.rank, known.modules) == (4, lora.modules)
    assert_same_bits(load_adapter(folder / "adapter", known), params)


def test_a_resumed_run_wants_its_own_base(whole, tmp_path: Path):
    folder, options, compiled = whole
    other = tmp_path / "other"
    shutil.copytree(folder / "base", other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + np.float32(1e-3)
    save_file(weights, other / "model.safetensors")
    elsewhere = ["--model", str(other), "--checkpoint.export_dir", str(tmp_path / "x")]
    setup = made(*options, "--resume", *elsewhere)
    roles = replace(compiled.roles, models=setup.roles.models)  # the programs are there
    run = SftRun(replace(setup, roles=roles), StopSignals())
    with pytest.raises(UserError, match="are of another base, whose weights differ"):
        run.begin()
    run.files.release()
