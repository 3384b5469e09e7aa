"""Fixtures of several files here."""

from collections.abc import Callable, Iterator

import pytest
from judges import Judge, judges

from pat_jax.rl.rewards import endpoint as reward_endpoint


@pytest.fixture
def serve() -> Iterator[Callable[..., Judge]]:
    """Starts an endpoint of rewards."""
    with judges() as start:
        yield start


@pytest.fixture
def soon(monkeypatch) -> None:
    """Tries follow each other in no time."""
    monkeypatch.setattr(reward_endpoint, "_FIRST_WAIT", 0.001)
