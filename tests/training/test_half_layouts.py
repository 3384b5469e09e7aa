"""Layouts by which copies of models come to half of the devices of each process."""

from dataclasses import replace

import pytest
from fakes import FakeDevice
from runs import QWEN3, TINY

from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import parse
from pat_jax.layout.layout import least_tp
from pat_jax.layout.mesh import padded_for
from pat_jax.models.policy import Policy
from pat_jax.training.build_copies import HalfLayouts, half_layouts
from pat_jax.training.trainable_params import TrainableParams


def halves(processes: int, each: int, fsdp_size: int = 0, embed_dim: int = 1536) -> HalfLayouts:
    """Of processes with `each` devices."""
    devices = [FakeDevice(i, i // each, platform="cpu") for i in range(processes * each)]
    half = [device for device in devices if device.id % each >= each // 2]
    model = padded_for(devices, replace(QWEN3, embed_dim=embed_dim, num_heads=32, num_kv_heads=8))
    held = TrainableParams(Policy.from_config(model), least_tp(devices, model, fsdp_size=fsdp_size))
    asked = "--placement.tail", "4", "--fsdp_size", str(fsdp_size)
    return half_layouts(parse([*TINY, *asked]), held, half)


@pytest.mark.parametrize(
    ("processes", "each", "fsdp_size", "shards"),
    [
        (1, 8, 0, 4),
        (1, 8, 8, 4),
        (1, 8, 2, 2),
        (2, 8, 0, 8),
        (2, 8, 8, 4),
        (2, 8, 2, 2),
        (4, 8, 0, 8),  # not 16: no process has those of its half
        (4, 8, 16, 8),
        (3, 8, 0, 4),
        (3, 2, 0, 1),
        (6, 4, 0, 4),
    ],
)
def test_each_process_has_all_that_its_half_needs(
    processes: int, each: int, fsdp_size: int, shards: int
):
    found = halves(processes, each, fsdp_size)
    sizes = {layout.size(layout.fsdp_axes) for layout in found}
    assert sizes == {shards}


def test_a_half_that_divides_a_model_in_another_way_is_refused():
    with pytest.raises(OptionError) as error:
        halves(2, 6, embed_dim=2048)
    words = (
        "placement.tail is 4: expected 0: half of each of 2 processes divides a model in another"
    )
    assert words in str(error.value)
