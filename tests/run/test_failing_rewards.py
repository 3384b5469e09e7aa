"""Runs whose reward function fails: for some responses, for all, or before the first."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from runs import TINY, json_lines, run

from pat_jax.run.logging.metrics import read_metrics

REWARDS = """
def nothing_for_some(prompts, completions):
    return [None if len(text) % 3 == 0 else 1e39 if len(text) % 3 == 1 else 1.0 for text in completions]

def nothing_for_any(prompts, completions):
    if completions[0]:
        raise RuntimeError("of the user")
    return [1.0] * len(completions)
"""


def train(tmp_path: Path, reward: str, code: int = 0) -> str:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    options = ["--warm_start.steps", "0", "--reward", f"my_rewards:{reward}", "--run_dir", "here"]
    return run(*TINY, *options, cwd=tmp_path, code=code)


@pytest.mark.slow
def test_responses_without_a_reward_are_left_out_counted_and_said(tmp_path: Path):
    output = train(tmp_path, "nothing_for_some")
    rows = read_metrics(tmp_path / "here" / "metrics.jsonl")
    for row in rows[1:]:
        assert row["reward/failed"] == row["reward/failed/none"] + row["reward/failed/not_a_number"]
        assert row["reward/mean"] == 1 and row["reward/groups_without_signal"] == 1
        assert np.isfinite(row["train/loss"])
    assert rows[0]["eval/reward"] == 1 and 0 < rows[0]["eval/failed"] < 8
    assert "responses could not be scored and are left out (" in output
    assert "more than float32 holds" in (tmp_path / "here" / "run.log").read_text()


@pytest.mark.slow
def test_a_reward_that_never_works_is_an_error_with_its_traceback_in_the_log(tmp_path: Path):
    output = train(tmp_path, "nothing_for_any", code=2)
    assert "has scored none of 8 responses (8 exception)" in output
    assert 'raise RuntimeError("of the user")' in (tmp_path / "here" / "run.log").read_text()
    assert "The responses are kept in here/completions.jsonl" in output
    kept = json_lines(tmp_path / "here" / "completions.jsonl")
    assert [line["reward"] for line in kept] == [None] * 8


@pytest.mark.slow
def test_an_endpoint_that_goes_down_ends_the_run_and_loses_no_response(tmp_path: Path):
    asked: list[int] = []

    class UpOnce(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(len(json.loads(content)["prompts"]))
            self.send_response(200 if len(asked) == 1 else 503)
            self.end_headers()
            self.wfile.write(b'{"scores": [0, 1]}')

    with ThreadingHTTPServer(("127.0.0.1", 0), UpOnce) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/judge"
        options = f"--warm_start.steps 0 --reward {url} exact --reward_retries 1 --run_dir here"
        output = run(*TINY, *options.split(), cwd=tmp_path, code=2)
        server.shutdown()
    (error,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert "none of 8 responses has a reward (8 endpoint)" in error
    assert "in each of 2 tries" in error
    assert asked[0] == 2 and len(asked) == 1 + 8 * 2
    kept = json_lines(tmp_path / "here" / "completions.jsonl")
    assert [line["kind"] for line in kept] == ["eval"] * 8
