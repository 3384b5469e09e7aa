"""The token that endpoints are shown comes from the environment, and goes nowhere else."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import dump, parse
from pat_jax.run.scoring import open_scorer


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


def test_the_variable_is_written_down_and_its_value_is_not(shown, monkeypatch):
    url, seen = shown
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    config = parse(["--preset", "demo", "--reward", url, "--reward_token_env", "JUDGE_TOKEN"])
    with open_scorer(config, config.reward) as scorer:
        assert scorer.score(["p"], ["a"], {}).tolist() == [1]
    assert seen == ["Bearer s3cret"]
    assert "JUDGE_TOKEN" in dump(config) and "s3cret" not in dump(config) + repr(config)


@pytest.mark.parametrize("value", [None, "two words", "ö"])
def test_a_variable_without_a_token_is_one_sentence(shown, monkeypatch, value: str | None):
    if value is not None:
        monkeypatch.setenv("JUDGE_TOKEN", value)
    config = parse(["--preset", "demo", "--reward", shown[0], "--reward_token_env", "JUDGE_TOKEN"])
    with pytest.raises(UserError, match="--reward_token_env is 'JUDGE_TOKEN': expected") as error:
        open_scorer(config, config.reward)
    assert "\n" not in str(error.value) and (not value or value not in str(error.value))


@pytest.mark.parametrize("name", ["sk-1234", "1A", "A\n"])
def test_what_is_no_name_is_refused(name: str):
    with pytest.raises(UserError, match="expected the name of an environment variable, or nothing"):
        parse(["--preset", "demo", "--reward_token_env", name])
