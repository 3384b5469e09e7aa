"""The lossless contract where query heads are padded, and where axes come in another order."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import pytest

from pat_jax.layout.mesh import padded_for
from pat_jax.models.config import ModelConfig
from tests.lossless import MODELS, Settings, Subject, make_requests
from tests.near_ties import check_lossless


def heads(num_heads: int, kv_heads: int, **more: int) -> ModelConfig:
    return replace(MODELS["kv2"], num_heads=num_heads, num_kv_heads=kv_heads, **more)


def check(config: ModelConfig, settings: Settings, num_devices: int, path: Sequence[int]) -> None:
    """Of an adaptive run and of every layout, all held against the unpadded model."""
    config = padded_for(jax.devices()[:num_devices], config)
    one = Subject(config, settings, num_devices=num_devices)
    requests = make_requests(settings, seed=0)
    static, _ = one.run(requests, one.static(1))
    adaptive, report = one.run(requests, one.adaptive(path, "migrate", len(requests)))
    assert len(report.switches) == len(path) - 1
    others = [one.run(requests, one.static(split.tp))[0] for split in one.engine.layouts]
    check_lossless(one.compared(requests, static, adaptive, *others))


@pytest.mark.slow  # each compiles an engine of its own
@pytest.mark.parametrize(
    "num_heads, kv_heads, mlp_dim, num_devices, path",
    [
        (9, 3, 48, 6, (1, 3, 6, 1)),
        (28, 4, 64, 8, (1, 8, 4)),
        (20, 4, 64, 6, (1, 2, 1)),  # three devices of a replica would divide nothing
    ],
)
def test_switching_changes_no_token(num_heads, kv_heads, mlp_dim, num_devices, path):
    settings = Settings(sequences=num_devices * 2, min_rows=4, min_length=64)
    check(heads(num_heads, kv_heads, mlp_dim=mlp_dim), settings, num_devices, path)


def test_adapters_beside_padded_weights_are_exact_at_a_switch():
    settings = Settings(sequences=4, min_rows=4, min_length=64, lora_rank=2)
    check(heads(9, 3, num_layers=1), settings, 2, (1, 2))
