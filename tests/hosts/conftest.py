"""Fixtures of several files here."""

import pytest
from joined import begin_to_end

from pat_jax.common.hosts import together


@pytest.fixture
def ended(monkeypatch) -> list[int]:
    """Exit codes of the processes that would have ended."""
    monkeypatch.setattr(together, "FAILURE_MESSAGE_S", 0.01)
    return begin_to_end()
