"""Endpoints of rewards, right here, and questions to them."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, SupportsIndex

from pat_jax.rl.rewards.function import KeptScores
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.scorer import RewardScorer, Scoring

# Status; what is sent as JSON, or text that is sent as it is; and headers, if any.
Answer = tuple[int, object] | tuple[int, object, dict[str, str]]


class Judge:
    """Answers each question with what `answer` makes of it, and remembers them."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]):
        self.answer, self.asked = answer, list[dict[str, Any]]()
        self.tokens: list[str | None] = []  # that came with each question
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                question = json.loads(self.rfile.read(length))
                judge.asked.append(question)
                judge.tokens.append(self.headers["Authorization"])
                status, output, *headers = judge.answer(question)
                body = (output if isinstance(output, str) else json.dumps(output)).encode()
                with contextlib.suppress(OSError):  # nobody waits for it any more
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    for name, value in {} if not headers else headers[0].items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/judge"


@contextlib.contextmanager
def judges() -> Iterator[Callable[[Callable[[dict[str, Any]], Answer]], Judge]]:
    """Starts one for each function that it is given; all end with the context."""
    started: list[Judge] = []

    def start(answer: Callable[[dict[str, Any]], Answer]) -> Judge:
        started.append(Judge(answer))
        threading.Thread(target=started[-1].server.serve_forever, args=(0.01,), daemon=True).start()
        return started[-1]

    yield start
    for judge in started:
        judge.server.shutdown()
        judge.server.server_close()


def lengths(question: dict[str, Any]) -> Answer:
    return 200, {"scores": [len(text) for text in question["completions"]]}


def begin(
    scorer: RewardScorer,
    prompts: Sequence[str],
    completions: Sequence[str],
    order: Sequence[int] | None = None,
    kept: KeptScores | None = None,
) -> Scoring[SupportsIndex]:
    """All responses, which have ended in this order."""
    told = [Response(prompt, text, {}) for prompt, text in zip(prompts, completions, strict=True)]
    scoring = scorer.begin(prompts, told.__getitem__, kept)
    for row in order or range(len(told)):
        scoring.add(row, row)
    return scoring
