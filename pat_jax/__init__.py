"""pat_jax: reinforcement learning of language models whose rollout changes its layout while it runs."""

__version__ = "0.1.0"
