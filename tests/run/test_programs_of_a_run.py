"""Programs of a run: none compiles once it has begun, and plain operations replace a wrong kernel."""

import logging
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from compilations import counted_in_iterations
from runs import TINY, run_to_end

from pat_jax.config.command_line import parse
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.warm_up import kernel_check
from pat_jax.models.cache import paged_layer
from pat_jax.models.kernels.kernel_choice import NAMES, Kernels
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.start.engine_setup import build_engine
from pat_jax.run.start.setup import build, model_config

# One in two responses is right, by its length: some groups teach, and some are drawn anew.
BY_LENGTH = """
def score(prompts, completions, **columns):
    return [float(len(text) % 2) for text in completions]
"""


@pytest.mark.slow  # each compiles a trainer and an engine
@pytest.mark.parametrize(
    "learning",
    [
        ("--algorithm.name", "dapo"),
        ("--algorithm.name", "gspo", "--algorithm.num_iterations", "2", "--algorithm.beta", "0.01"),
        ("--scan_layers", "true", "--algorithm.name", "dr_grpo"),
    ],
    ids=lambda options: options[1],
)
def test_iterations_compile_nothing(learning: tuple[str, ...], tmp_path: Path):
    (tmp_path / "reward.py").write_text(BY_LENGTH)
    switches = ["--layout", "dp1tp2@7"]
    reward = ["--reward", f"{tmp_path / 'reward.py'}:score", "--rollout.burst_steps", "8"]
    reward += ["--warm_start.steps", "0"]
    folder = ["--run_dir", str(tmp_path / "run"), "--checkpoint.every", "2", "--steps", "4"]
    config = parse([*TINY, *switches, *reward, *folder, *learning])
    setup = build(config, jax.devices()[:2])
    with counted_in_iterations() as compiled:
        run_to_end(setup)
    assert compiled == []
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    iterations = [row for row in rows if "train/loss" in row]
    assert len(iterations) == 4 and sum(row["rollout/switches"] for row in iterations) >= 3
    if "dapo" in learning:
        assert max(row["rollout/batches"] for row in iterations) > 1


OF_A_LAYER = (
    "--model tiny --data arithmetic --compute_dtype float32 --layout dp1tp1 --rollout.prompts_per_step 2 "
    "--rollout.num_generations 2 --rollout.max_prompt_length 8 --rollout.max_completion_length 24 "
    "--rollout.min_length 32 --rollout.burst_steps 16 --algorithm.mini_batch_size 2"
)


def generated() -> tuple[Kernels, list[np.ndarray]]:
    """By what, and the tokens of four responses."""
    config, devices = parse(OF_A_LAYER.split()), jax.devices()[:1]
    model = model_config(config.task, config.layout_choice, devices)
    model = replace(model, head_dim=16)  # wide enough for kernels over pages
    engine = build_engine(config.engine, config.task, model, devices)
    ((split, layout),) = engine.layouts.items()
    engine.compile()
    shardings = layout.param_shardings(engine.policy)
    engine.set_weights(engine.policy.init(0, shardings, engine.dtype), layout)
    requests = [Request((3, 4, 5 + i), sequence_key(0, i), 24, ignore_eos=True) for i in range(4)]
    done, _ = engine.rollout(requests, FixedLayout(split))
    jax.clear_caches()
    return layout.kernels, [one.tokens for one in done]


@pytest.mark.slow  # compiles two engines
def test_a_wrong_kernel_is_replaced_and_the_tokens_are_right(monkeypatch, tmp_path, caplog):
    _, expected = generated()
    monkeypatch.setattr(kernel_check, "KEPT", tmp_path / "kernels.json")
    monkeypatch.setattr(Kernels, "of", lambda platform: Kernels(platform).having(NAMES))
    pages = paged_layer.KERNELS["cpu"]
    wrong = pages._replace(decode=lambda *arrays: -pages.decode(*arrays))
    monkeypatch.setitem(paged_layer.KERNELS, "cpu", wrong)
    with caplog.at_level(logging.WARNING):
        kernels, tokens = generated()
    assert kernels == Kernels("cpu").having(NAMES).without(["decode"])
    np.testing.assert_array_equal(tokens, expected)
    warned = [one for one in caplog.records if one.levelno >= logging.WARNING]
    sentence = warned[0].getMessage()
    assert len(warned) == 1
    assert "kernel 'decode'" in sentence and "plain operations compute it" in sentence
