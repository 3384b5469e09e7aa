"""What processes tell each other: the same values at the other end, and nothing that runs code."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.link import Message
from pat_jax.common.hosts.waiting import At
from pat_jax.common.hosts.wire import of_bytes, to_bytes
from pat_jax.config.command_line import parse
from pat_jax.planning.types import Split
from pat_jax.rl.rewards.outcome import Cause, Failure

KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
VALUES = st.recursive(
    KEYS | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS | st.tuples(KEYS), inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
)


def typed(value: object) -> object:
    """With the type of each part: True is 1, and a tuple no list."""
    if isinstance(value, list | tuple):
        return type(value), [typed(one) for one in value]
    if isinstance(value, set | frozenset):
        return type(value), {typed(one) for one in value}
    if isinstance(value, dict):
        return dict, [(typed(key), typed(one)) for key, one in value.items()]
    return type(value), value


@given(VALUES)
@example({"tuple": [1], "dict": {}, "pat_jax.x:Y": None})
def test_plain_values_come_as_they_were(value: object):
    assert typed(of_bytes(to_bytes(value))) == typed(value)


@pytest.mark.parametrize(
    "value",
    [
        parse(["--preset", "demo", "--reward", "exact", "math"]),
        [Message("value", "plan", ("made", At("x", 3))), Split(2, 4), Path("/a b"), Cause.NONE],
        {(0, 1): Failure(Cause.TIMEOUT, "late"), "x": [float("inf"), 10**40, "\ud800"]},
    ],
)
def test_values_of_this_package_come_as_they_were(value: object):
    found = of_bytes(to_bytes(value))
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint64", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_arrays_come_bit_for_bit(dtype: str, shape: tuple[int, ...]):
    array = np.random.default_rng(0).normal(size=shape).astype(np.dtype(dtype))
    found = of_bytes(to_bytes([array]))[0]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, shape, array.tobytes())


def test_an_error_is_the_same_sentence():
    found = of_bytes(to_bytes(UserError("a: expected b.")))
    assert type(found) is UserError and str(found) == "a: expected b."


@pytest.mark.parametrize("value", [object(), len, UserError, np.array([{}]), 1j, range(3)])
def test_other_values_are_refused(value: object):
    with pytest.raises((TypeError, AttributeError)):
        to_bytes({"x": [value]})


@pytest.mark.parametrize(
    "content",
    [
        b'{"os:system": ["true"]}',
        b'{"builtins:eval": ["1"]}',
        b'{"pat_jax.common.files:os.system": ["true"]}',
        b'{"pat_jax.common.files:replace_text": ["/tmp/x", "y"]}',
        b'{"pat_jax.common.hosts.waiting:Wait": []}',
        b'{"pat_jax.common.hosts.none:A": []}',
        b'{"http:HTTPStatus": ["OK"]}',  # an enum, and a named tuple, of others
        b'{"urllib.parse:DefragResult": ["a", "b"]}',
        b'{"pat_jax.planning.types:Plan": [1]}',
        b'{"array": ["object", [1], {"bytes": "AAAAAAAAAAA="}]}',
        b'{"tuple": [], "list": []}',
        b"{}",
        b"\xff",
        b"\x80\x04",
    ],
)
def test_what_is_no_value_makes_none(content: bytes):
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError, ImportError)):
        of_bytes(content)
