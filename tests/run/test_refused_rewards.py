"""A reward that cannot work is refused, and a mended one begins in the same folder."""

from pathlib import Path

import jax
import pytest
from runs import TINY, named

import pat_jax
from pat_jax import UserError
from pat_jax.commands import train

OPTIONS = named(TINY)
REWARDS = """
def one_too_few(completions, **columns):
    return [1.0] * (len(completions) - 1)

def without_columns(completions, level):
    return [1.0] * len(completions)

def right(completions, **columns):
    return [1.0] * len(completions)
"""


class Began(Exception):
    pass


@pytest.fixture
def files(tmp_path: Path, monkeypatch) -> Path:
    def begins(run: train.Run) -> None:
        raise Began

    monkeypatch.setattr(train, "configure", lambda count: jax.devices()[:count])
    monkeypatch.setattr(train.Run, "compile", begins)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text("def right(:\n")
    return tmp_path


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("nosuch.py:right", "does not exist"),
        ("broken.py:right", "importing .* raised SyntaxError"),
        ("rewards.py:wrong", "wrong"),
        ("rewards.py:one_too_few", "returned 1 values where a list of 2 numbers"),
        ("rewards.py:without_columns", r"cannot be called \(missing a required argument: 'level'"),
    ],
)
def test_a_reward_that_cannot_work_takes_no_folder(files: Path, reward: str, words: str):
    folder, right = str(files / "run"), str(files / "rewards.py:right")
    with pytest.raises(UserError, match=words):
        pat_jax.train(OPTIONS, reward=str(files / reward), run_dir=folder)
    for more in ({}, {"resume": "auto"}):  # and once more, whatever the first had written
        with pytest.raises(Began):
            pat_jax.train(OPTIONS, reward=right, run_dir=folder, **more)


def test_a_function_that_cannot_be_sent_takes_no_folder(files: Path):
    made = iter([1.0])

    def held(completions, **columns):
        return [next(made) for _ in completions]

    generator = (x for x in [1.0])

    def unsendable(completions, **columns):
        return [next(generator) for _ in completions]

    with pytest.raises(UserError, match="cannot be sent to the processes that score"):
        pat_jax.train(OPTIONS, reward=[held, unsendable], run_dir=str(files / "run"))
    assert not (files / "run").exists()
