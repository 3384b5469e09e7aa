"""Tests for one GPU: `JAX_PLATFORMS=cuda python -m pytest -m gpu tests/gpu`, in eight minutes.

`PAT_JAX_GPU_TESTS_ON=cpu python -m pytest -m gpu tests/gpu` runs the same on a CPU, where the kernels of a GPU are
interpreted.
"""

from collections.abc import Iterator

import jax
import pytest
from one_device import PLATFORM, device


@pytest.fixture(autouse=True, scope="session")
def on_the_platform() -> None:
    if (here := device().platform) != PLATFORM:
        pytest.exit(
            f"tests/gpu found a {here}, expected a {PLATFORM}: set JAX_PLATFORMS=cuda, or "
            "PAT_JAX_GPU_TESTS_ON=cpu to try them on a CPU",
            returncode=3,
        )


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Products in float32 are of float32: otherwise a GPU takes TF32, which moves near-ties."""
    before = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", before)
