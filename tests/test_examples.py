"""The examples run, and what they show is so."""

import importlib.util

import jax
import pytest
from runs import ROOT, SMALL_ROLLOUT

from pat_jax.config.command_line import parse


@pytest.mark.slow  # a run that learns
def test_the_flat_grpo_learns(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "examples" / "grpo.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    # The process has its eight devices already.
    monkeypatch.setattr(example, "configure", lambda count: jax.devices()[:count])
    options = ["--model", "tiny", *SMALL_ROLLOUT, "--rollout.max_completion_length", "40"]
    options += ["--rollout.prompts_per_step", "16", "--algorithm.mini_batch_size", "16"]
    options += ["--optimizer.learning_rate", "2e-3"]
    config = parse([*example.DEFAULTS, *options, "--steps", "8"])
    means = example.train(config)
    assert len(means) == 8 and min(means[-2:]) > means[0] + 0.2
    assert "step 8: reward" in capsys.readouterr().out
