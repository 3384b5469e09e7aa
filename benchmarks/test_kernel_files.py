"""Kernels of tables: interpolation, and how near the shipped coefficients are."""

from itertools import product

import numpy as np
import pytest

from benchmarks.kernel_files import Interpolated, KernelTables
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.targets import Target
from tests.published import DATA, needs_data


def test_a_line_goes_through_its_points_and_on_with_its_last_slope():
    line = Interpolated({1: 10.0, 2: 20.0, 4: 24.0})
    assert [line(size) for size in (1, 1.5, 2, 3, 4, 6)] == [10, 15, 20, 22, 24, 28]
    assert Interpolated({1: 5.0, 2: 4.0})(3) == 4.0  # noise is no downward slope
    assert Interpolated({3: 7.0})(100) == 7.0


@needs_data
@pytest.mark.parametrize("name", ["a100", "h100", "h200"])
def test_steps_of_coefficients_are_near_those_of_the_tables(name: str):
    target, model = Target.parse(f"{name}:8"), preset("qwen3-14b")
    kinds = KernelTables(DATA, target), ModelledKernels(target)
    table, modelled = (Composer(kernels, model) for kernels in kinds)
    errors = [
        modelled.decode_step(split, rows, length) / table.decode_step(split, rows, length) - 1
        for split, rows, length in product(
            [Split(8, 1), Split(4, 2), Split(2, 4), Split(1, 8)], [1, 8, 64, 256], [256, 1024, 8192]
        )
    ]
    assert np.abs(errors).mean() < 0.09 and np.abs(errors).max() < 0.35
