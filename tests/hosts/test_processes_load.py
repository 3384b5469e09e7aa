"""Processes that have different experts of a layer: each reads its own, and together they export."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from runs import ROOT
from safetensors.numpy import load_file
from several import ends, start_all

from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_files import WEIGHTS_FILE
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def test_two_processes_read_their_own_experts_and_export_them_all(tmp_path: Path):
    policy = Policy.from_config(preset("tiny-moe"))
    export(tmp_path / "source", policy, policy.init(3), jnp.float32)
    options = ["--source", str(tmp_path / "source"), "--out", str(tmp_path / "out")]
    worker = (str(ROOT / "tests" / "hosts" / "loading_worker.py"),)
    found = ends(start_all(2, *options, program=worker))
    assert [code for code, _ in found] == [0, 0], found

    stored = load_file(tmp_path / "source" / WEIGHTS_FILE)
    for i, own in enumerate((range(4), range(4, 8))):
        others = {name for name in stored if ".experts." not in name}
        experts = {
            f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
            for layer in (0, 2)
            for expert in own
            for part in ("gate", "up", "down")
        }
        assert set(json.loads((tmp_path / f"opened-{i}.json").read_text())) == others | experts
    written = load_file(tmp_path / "out" / WEIGHTS_FILE)
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(written[name], tensor)
