"""Every kernel against plain operations, at the shapes of published models."""

from typing import Any

import pytest
from broken_kernels import break_kernels, one_key_less
from one_device import PLATFORM, device, kernels, note

from pat_jax.engine.warm_up.kernel_cases import ROUTED, Part
from pat_jax.engine.warm_up.kernel_check import check_kernels
from pat_jax.models.kernels.kernel_choice import Kernels

pytestmark = pytest.mark.gpu
NAMES = ["decode", "prefill", "verify", "append", "rows forward", "rows backward"]
# KV heads of a device, query heads on each, their width, tokens of a page. An interpreted kernel takes minutes
# for as many heads as models have.
SHAPES = {
    "qwen3-8b": (8, 4, 128, 16),
    "qwen3-8b of TP 8": (1, 4, 128, 16),
    "qwen3-14b of TP 4": (2, 5, 128, 16),
    "qwen2.5-0.5b": (2, 7, 64, 16),
    "qwen2.5-7b of TP 4": (1, 7, 128, 32),
    "llama-3.1-70b of TP 8": (1, 8, 128, 64),
}
SMALL = {"small": (1, 2, 64, 16), "smaller": (2, 3, 16, 8)}
SIDES = (2048, 768) if PLATFORM == "gpu" else (32, 48)  # of an expert: what it takes, and its width


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SHAPES if PLATFORM == "gpu" else SMALL)
def test_kernels_compute_what_plain_operations_compute(name: str, dtype: str):
    part = Part(*(SHAPES | SMALL)[name], dtype)
    found = check_kernels(device(), [part], kernels())
    assert [(x.name, x.trouble) for x in found] == [(each, "") for each in NAMES]
    note(f"kernels {name} {dtype}", {x.name: [x.error, x.seconds] for x in found})


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "int8"), ("bfloat16", "fp8")],
)
def test_experts_are_what_plain_operations_compute(dtype: str, weights: Any):
    part = Part(*SMALL["smaller"], dtype, SIDES, weights)
    found = check_kernels(device(), [part], Kernels(PLATFORM).having(["experts"]))
    names = [*ROUTED, "experts backward"]
    assert [(x.name, x.trouble) for x in found] == [(each, "") for each in names]
    note(f"experts {dtype} {weights}", {x.name: [x.error, x.seconds] for x in found})


def test_a_kernel_that_leaves_out_a_key_is_found(monkeypatch):
    break_kernels(monkeypatch, one_key_less, "decode", platform=PLATFORM)
    found = check_kernels(device(), [Part(*SMALL["smaller"], "float32")], kernels())
    assert {x.name for x in found if x.trouble} == {"decode"}
