"""The version of pat_jax; imports nothing, so that every module can import it."""

__version__ = "0.1.0"
