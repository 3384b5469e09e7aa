"""What Python's callers may give by mistake: one sentence, before any device is asked for."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import pat_jax
from pat_jax import SavedRun, UserError
from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.text_session import TextSession
from pat_jax.run.shipped_rewards import REWARDS, check_shipped


def named(value: object) -> str:
    """The same in every process: an object's own words have its address."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))[:20]


WRONG: list[Any] = [
    3,
    3.5,
    True,
    b"x",
    object(),
    {1},
    [1],
    [[]],
    {"a": object()},
    1j,
    range(3),
    int,
]
NAMES = [
    "x" * 300,
    "d/" * 3000,
    "a\0b",
    "\udcff",
    "",
    " ",
    "/dev/full",
    "/dev/zero",
    "/proc/self/mem",
]


def refused(call: Any) -> str:
    with pytest.raises(UserError) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 1300 and sentence.rstrip().endswith((".", "?"))
    return sentence


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch):
    for name in ("train", "plan", "generate", "profile"):
        module = import_module(f"pat_jax.commands.{name}")
        monkeypatch.setattr(module, "configure", lambda *_: pytest.fail("it went on"))


@pytest.mark.parametrize("value", WRONG, ids=named)
def test_a_config_that_is_none(value):
    for call in (pat_jax.train, pat_jax.plan, pat_jax.simulate, pat_jax.profile, pat_jax.session):
        refused(lambda call=call: call(value))


@pytest.mark.parametrize("value", WRONG, ids=named)
def test_options_that_are_none(value: Any):
    """The value of a section, of a number, and of an option that nobody has."""
    wrong: tuple[dict[str, Any], ...] = (
        {"rollout": value},
        {"no_such_option": value},
        {"rollout": {"top_p": [value, value]}},
    )
    for options in wrong:
        refused(lambda options=options: pat_jax.train(**options))
    refused(lambda: pat_jax.simulate(lengths=value, profile=value))


@pytest.mark.parametrize(
    "value", [3, 3.5, b"x", {}, [], (), [3], [None], {"f": print}, object(), [[]]]
)
def test_a_reward_that_is_none(value):
    assert "reward is " in refused(lambda: pat_jax.train("demo", reward=value))


@pytest.mark.parametrize("value", [*WRONG, *NAMES], ids=named)
def test_a_run_that_is_none(value):
    refused(lambda: SavedRun(value))
    refused(lambda: pat_jax.session(run=value))


@pytest.mark.parametrize("name", NAMES, ids=named)
def test_a_path_that_is_none(name: str):
    refused(lambda: pat_jax.train(name + ".yaml"))
    refused(lambda: pat_jax.simulate(profile=name))
    refused(lambda: pat_jax.plan(lengths=name or " ", model="tiny", max_prompt_length=8))


@pytest.mark.parametrize(
    "prompts", [3, None, b"x", {1}, [3], [None], [b"x"], [[None]], [["a"]], [{}], [{"x": 1}], [{3: 4}], [[{}]]]
)  # fmt: skip
def test_prompts_that_are_none(prompts):
    class Session:
        max_length = 64

    overrides = SamplingOverrides()
    session = TextSession(Session(), None, overrides, overrides, 0)  # pyright: ignore[reportArgumentType]
    refused(lambda: session.generate(prompts))


def test_a_pickled_reward_that_came_with_a_run_is_not_opened(tmp_path: Path):
    check_shipped(["math", f"{REWARDS}/0123.reward:f", "file.py:f", "http://a/b"])
    for path in (
        tmp_path / "a.reward",
        REWARDS / ".." / "a.reward",
        Path("a.reward"),
        REWARDS / "in" / "a.reward",
    ):
        assert "runs code" in refused(lambda path=path: check_shipped(["math", f"{path}:f"]))
