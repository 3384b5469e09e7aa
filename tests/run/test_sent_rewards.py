"""Functions of a running program score in processes of their own, as named ones do."""

import threading
import time
from pathlib import Path

import pytest

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.workers import RewardWorkers
from pat_jax.run.start.sent_code import send_reward

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
