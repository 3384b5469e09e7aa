"""Rewards that cannot work are refused; functions of a program are sent, and tokens of endpoints shown nowhere."""

import threading
import time
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
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.workers import RewardWorkers
from pat_jax.run import opened
from pat_jax.run.scoring import open_scorer
from pat_jax.run.start.sent_code import send_reward

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


RESPONSES = [Response("1+1=", text, {"answer": "2"}) for text in ("2", "22")]


def scores(spec: str, seconds: float = 20.0):
    workers = RewardWorkers(spec, 1, 0.0)
    try:
        return workers.submit(RESPONSES, seconds).result()
    finally:
        workers.close()


def test_a_closure_takes_along_what_it_has_closed_over(tmp_path: Path):
    weight, seen = 0.5, []

    def length(completions, answer, **columns):
        seen.append(completions)
        return [weight * len(text) + (text in answer) for text in completions]

    spec = send_reward(length, tmp_path / "rewards")
    assert spec.endswith(".reward:length") and scores(spec).scores == [1.5, 1.0]
    assert seen == []  # there, not here
    weight = 2.0
    other = send_reward(length, tmp_path / "rewards")
    assert other != spec and scores(other).scores == [3.0, 4.0]
    weight = 0.5
    assert send_reward(length, tmp_path / "rewards") == spec


def test_one_response_at_a_time_as_verl_asks(tmp_path: Path):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": len(solution_str), "half": len(solution_str) / 2}

    found = scores(send_reward(compute_score, tmp_path))
    assert (found.scores, found.numbers) == ([1.0, 2.0], [{"half": 0.5}, {"half": 1.0}])


def test_one_that_hangs_is_killed_and_one_that_raises_is_told_of(tmp_path: Path):
    def hangs(completions, **columns):
        time.sleep(1000)

    def raises(completions, **columns):
        raise ArithmeticError("no such number")

    start = time.monotonic()
    killed, failed = (
        scores(send_reward(hangs, tmp_path), 0.5),
        scores(send_reward(raises, tmp_path)),
    )
    assert isinstance(killed.failure, Failure) and killed.failure.cause is Cause.TIMEOUT
    assert time.monotonic() - start < 60
    assert isinstance(failed.failure, Failure)
    assert "ArithmeticError: no such number" in failed.failure.text
    assert "in raises" in failed.failure.traceback


class Judge:
    def __call__(self, completions, **columns):
        return [1.0 for _ in completions]


def test_names_are_such_that_metrics_can_have_them(tmp_path: Path):
    assert send_reward(lambda completions, **columns: [0.0], tmp_path).endswith(":reward")
    assert send_reward(Judge(), tmp_path).endswith(":Judge")


def test_what_no_other_process_can_have_is_refused(tmp_path: Path):
    lock = threading.Lock()

    def locked(completions, **columns):
        with lock:
            return [0.0 for _ in completions]

    with pytest.raises(UserError, match=r"reward 'locked' cannot be sent to the processes .*lock"):
        send_reward(locked, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_gone_or_damaged_is_refused_by_name(tmp_path: Path):
    spec = send_reward(Judge(), tmp_path)
    path = Path(spec.partition(":")[0])
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(UserError, match=r"importing .* raised"):
        RewardWorkers(spec, 1, 0.0)
    path.unlink()
    with pytest.raises(UserError, match="does not exist"):
        RewardWorkers(spec, 1, 0.0)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"reward 'Judge' cannot be written to .*PAT_JAX_CACHE"):
        send_reward(Judge(), tmp_path / "file")
