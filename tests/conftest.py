"""Pins the world: eight CPU devices, no rank promotion, compiled programs kept between runs.

Runs before any test module is imported, and so before any backend starts.
"""

import gc
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# LLVM's optimizations take a third of what compiling does; XLA's own, which tests look at, stay. The
# slow tests run what users run: `XLA_FLAGS= python -m pytest -m slow`.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import pytest
from hypothesis import settings

# A cache for each worker of pytest-xdist: none reads an entry that another is still writing.
CACHE = Path(__file__).parent.parent / ".cache" / "jax" / os.environ.get("PYTEST_XDIST_WORKER", "")

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

settings.register_profile("pat_jax", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("pat_jax")


def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> None:
    """Frees what a file, or a folder, has compiled for itself.

    XLA:CPU maps a program into memory in some twenty pieces; Linux allows a process 65,530 of them, and
    the one too many is a segmentation fault.
    """
    if nextitem is not None and nextitem.path == item.path:
        return
    _forget(item.module)
    if nextitem is None or nextitem.path.parent != item.path.parent:
        import fakes

        _forget(fakes)
    jax.clear_caches()
    gc.collect()


def _forget(module: Any) -> None:
    """What its cached functions hold."""
    for value in vars(module).values():
        if hasattr(value, "cache_clear") and value.__module__ == module.__name__:
            value.cache_clear()
