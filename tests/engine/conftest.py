"""Fixtures of several files here."""

import pytest
from two_devices import look_at_pages


@pytest.fixture
def free_pages(monkeypatch) -> None:
    """Every page is free at the end of a rollout, and no NaN is in it."""
    look_at_pages(monkeypatch)
