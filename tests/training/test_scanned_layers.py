"""Layers as a loop in the trainer's programs: their gradients, and where it is chosen."""

from dataclasses import replace
from typing import Any

import pytest
from trainers import CHAIN, CONFIG

from pat_jax.common.rules import OptionError
from pat_jax.config.compute import Compute
from pat_jax.config.run import RunConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.profiling.cross_compile.target_build import Order
from pat_jax.profiling.predict.targets import Target
from pat_jax.training.build import functions_of, scans_layers

POLICY = Policy.from_config(replace(CONFIG, num_layers=2))


def test_auto_is_a_loop_where_compilers_take_long():
    half, whole = "bfloat16", "float32"
    assert scans_layers("auto", 8, "tpu", half) and scans_layers("auto", 36, "tpu", whole)
    assert scans_layers("auto", 8, "cpu", whole)
    for at in ((7, "tpu", half), (36, "gpu", half), (36, "cuda", whole), (36, "cpu", half)):
        assert not scans_layers("auto", *at)
        assert scans_layers("true", *at)
        assert not scans_layers("false", *at)


@pytest.mark.parametrize(
    ("target", "option", "is_scanned"),
    [("v5e:2x4", "auto", True), ("h100:8", "auto", False), ("h100:8", "true", True)],
)
def test_shallow_models_of_a_plan_run_as_the_whole_one(target: str, option: Any, is_scanned: bool):
    config = RunConfig(scan_layers=option, compute_dtype="bfloat16")
    order = Order.of(Target.parse(target), config, preset("qwen3-8b"), (2, 4))
    assert order.config.scan_layers == str(is_scanned).lower()


def test_what_a_cpu_cannot_is_refused():
    layout, asked = CHAIN["dp8tp1"], Compute("bfloat16")
    with pytest.raises(OptionError, match=r"--scan_layers is 'true'.*expected false with"):
        functions_of(replace(asked, scan_layers="true"), POLICY, layout)
    functions_of(asked, POLICY, layout)
    functions_of(replace(asked, scan_layers="true", dtype="float32"), POLICY, layout)
    assert POLICY.config.num_layers > 1
