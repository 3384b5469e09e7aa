"""JSON with one value gone wild: nested past recursion, out of range, or whatever else it can say."""

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

MARK = "here it is wild"  # stands for the value in a file's JSON
WILD = st.one_of(
    st.integers(1, 4).map(lambda size: "[" * 10**size + "]" * 10**size),
    st.integers(1, 4).map(lambda size: '{"a":' * 10**size + "1" + "}" * 10**size),
    st.integers(0, 400).map(lambda zeros: "1" + "0" * zeros),
    st.sampled_from([4299, 4300, 4301, 20_000]).map(lambda digits: "-" + "9" * digits),
    st.sampled_from(
        ["1e400", "-1e400", "NaN", "1e308", "1e-308", "-0", "null", "true", "0.5", "1e12"]
    ),
    st.sampled_from(['"\\ud800"', '""', '"x"', "[]", "{}", "[1, 2]", "[[], {}]", f'"{"x" * 999}"']),
)
ANYWHERE = st.integers(0, 10**6)


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every place of a JSON value, the whole included."""
    yield path
    inner: Any = ()
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield from places(each, (*path, key))


def with_wild(value: Any, where: int, wild: str) -> str:
    """The JSON text of `value` with `wild` in one of its places."""
    found = list(places(value))
    path = ("all", *found[where % len(found)])
    root: Any = {"all": json.loads(json.dumps(value))}
    holder = root
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = MARK
    return json.dumps(root["all"]).replace(json.dumps(MARK), wild)
