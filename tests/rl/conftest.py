"""Fixtures of several files here."""

import functools
from collections.abc import Callable, Iterator

import pytest
from judges import Judge, judges

from pat_jax.rl.rewards import endpoint as reward_endpoint
from pat_jax.rl.text import chat_template
from pat_jax.rl.text.text_worker import TextWorker


@pytest.fixture
def serve() -> Iterator[Callable[..., Judge]]:
    """Starts an endpoint of rewards."""
    with judges() as start:
        yield start


@pytest.fixture
def soon(monkeypatch) -> None:
    """Tries follow each other in no time."""
    monkeypatch.setattr(reward_endpoint, "_FIRST_WAIT", 0.001)


the_worker = functools.cache(TextWorker)


@pytest.fixture
def one_process(monkeypatch) -> None:
    """All chat templates share a process, which takes seconds to start: for those that end none."""
    monkeypatch.setattr(chat_template, "take", the_worker)
