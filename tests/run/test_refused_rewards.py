"""A reward that cannot work is refused, and a mended one begins in the same folder; the token that endpoints
are shown goes nowhere else."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import jax
import pytest
from runs import TINY, named

import pat_jax
from pat_jax.commands import train
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import dump, parse
from pat_jax.run import opened
from pat_jax.run.scoring import open_scorer

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
    def begins(*_: object) -> None:
        raise Began

    monkeypatch.setattr(train, "configure", lambda count: jax.devices()[:count])
    monkeypatch.setattr(opened, "compile_run", begins)
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


@pytest.fixture
def shown() -> Iterator[tuple[str, list[str | None]]]:
    """The address of an endpoint that gives everything 1, and the authorizations that it has seen."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"scores": [1]}')

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score", seen
    server.shutdown()
    server.server_close()


def test_the_token_is_sent_and_written_nowhere(shown, monkeypatch):
    url, seen = shown
    monkeypatch.setenv("PAT_JAX_REWARD_TOKEN", "s3cret")
    config = parse(["--preset", "demo", "--reward", url])
    with open_scorer(config.reward, config.reward_limits) as scorer:
        assert scorer.score(["p"], ["a"], {}).tolist() == [1]
    assert seen == ["Bearer s3cret"]
    assert "s3cret" not in dump(config) + repr(config)


@pytest.mark.parametrize("value", ["two words", "ö", "a\nb"])
def test_a_variable_without_a_token_is_one_sentence(shown, monkeypatch, value: str):
    monkeypatch.setenv("PAT_JAX_REWARD_TOKEN", value)
    config = parse(["--preset", "demo", "--reward", shown[0]])
    with pytest.raises(UserError, match="PAT_JAX_REWARD_TOKEN holds no token: expected") as error:
        open_scorer(config.reward, config.reward_limits)
    assert "\n" not in str(error.value) and value not in str(error.value)
