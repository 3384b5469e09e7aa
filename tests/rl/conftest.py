"""Fixtures of several files here."""

from collections.abc import Callable, Iterator

import pytest
from judges import Judge, judges
from row_readers import CHATML
from tokenizer_files import write_tokenizer

from pat_jax.rl.rewards import endpoint as reward_endpoint
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer


@pytest.fixture(scope="session")
def chatty(tmp_path_factory) -> HuggingFaceTokenizer:
    folder = tmp_path_factory.mktemp("chatty")
    return HuggingFaceTokenizer(write_tokenizer(folder, eos_token="<eos>", chat_template=CHATML))


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> HuggingFaceTokenizer:
    """Without a chat template, but with a token that begins a text."""
    folder = tmp_path_factory.mktemp("plain")
    return HuggingFaceTokenizer(write_tokenizer(folder, eos_token="<eos>"))


@pytest.fixture
def serve() -> Iterator[Callable[..., Judge]]:
    """Starts an endpoint of rewards."""
    with judges() as start:
        yield start


@pytest.fixture
def soon(monkeypatch) -> None:
    """Tries follow each other in no time."""
    monkeypatch.setattr(reward_endpoint, "_FIRST_WAIT", 0.001)
