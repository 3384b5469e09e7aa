"""The decode benchmark of accelerators, as far as a CPU can tell."""

import jax
import pytest

from benchmarks.speed.gpu_decode import DTYPE, Cell, measure
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset

KIB = 1024


def test_bytes_of_a_step_are_weights_once_and_each_rows_own_tokens():
    cell = Cell("", preset("llama-3.1-8b"), rows=64, context=1024, steps=64, bursts=1)
    parameters, looked_up, of_token = 8_030_261_248, 128_256 * 4096, 128 * KIB
    # The first step reads 1,024 tokens of each row, the last one 63 more.
    cache = 64 * of_token * (1024 + 1024 + 63) / 2
    assert cell.step_bytes == 2 * (parameters - looked_up) + cache
    assert cell.held_bytes == 2 * parameters + 64 * of_token * (1024 + 64)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.slow  # an engine of its own
def test_a_cell_is_measured_by_the_engine_itself():
    cell = Cell("", preset("tiny"), rows=3, context=20, steps=8, bursts=2)
    params = Policy.from_config(cell.config).init(0, dtype=DTYPE)
    found = measure(cell, jax.devices()[:1], params, rounds=1, read_bytes=2**24)
    assert 0 < found["device_step_ms"] < 1e3 and 0 < found["wall_step_ms"] < 1e3
    assert found["host_gap"] == 1 - found["device_step_ms"] / found["wall_step_ms"]
    read = found["step_gb"] / found["device_step_ms"] * 1e3
    assert found["of_bandwidth"] == pytest.approx(read / found["bandwidth_gb_s"])
