"""The real small parts, made once a machine; a test without its part is skipped with one line."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the `parity` extra")

import jax
from small_parts import MODEL, Unreachable, part

# The backend starts now, with the devices of every test: a session of one device would start it with one.
assert jax.device_count() == 8


def _part_or_skip(name: str) -> Path:
    try:
        return part(name)
    except Unreachable as reason:
        pytest.skip(f"{name}: {reason}")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return _part_or_skip(MODEL)


@pytest.fixture
def text_part(request: pytest.FixtureRequest) -> Path:
    """The directory of a real tokenizer, by name."""
    return _part_or_skip(request.param)
