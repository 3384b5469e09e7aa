"""A kernel that is wrong on the devices of a run: plain operations compute the run's tokens."""

import logging
from dataclasses import replace

import jax
import numpy as np
import pytest

from pat_jax.config.command_line import parse
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.warm_up import kernel_check
from pat_jax.models.cache import paged_layer
from pat_jax.models.kernels.kernel_choice import NAMES, Kernels
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.run.start.engine_setup import build_engine
from pat_jax.run.start.setup import model_config

OPTIONS = (
    "--model tiny --data arithmetic --compute_dtype float32 --layout dp1tp1 --rollout.prompts_per_step 2 "
    "--rollout.num_generations 2 --rollout.max_prompt_length 8 --rollout.max_completion_length 24 "
    "--rollout.min_length 32 --rollout.burst_steps 16 --algorithm.mini_batch_size 2"
)


def generated() -> tuple[Kernels, list[np.ndarray]]:
    """By what, and the tokens of four responses."""
    config, devices = parse(OPTIONS.split()), jax.devices()[:1]
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
