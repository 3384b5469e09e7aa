"""Pins the world: eight CPU devices, no rank promotion, compiled programs kept between runs.

Runs before any test module is imported, and so before any backend starts.
"""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
from hypothesis import settings

CACHE = Path(__file__).parent.parent / ".cache" / "jax"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

settings.register_profile("pat_jax", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("pat_jax")
