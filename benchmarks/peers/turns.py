"""Work by turns: generators that answer one request after another, and training loops that are told when
to begin each of their iterations.

Run inside the processes of `engine_vs_peers.py` and `iteration_vs_peers.py`, whose environments share
nothing but this file.
"""

import json
import os
import sys
import time

sys.stdout = sys.stderr  # standard output carries one JSON line a turn


def answer(about, generate):
    """Answers each request, a line of JSON, with the seconds that `generate(request)` returns."""
    print(json.dumps(about), file=sys.__stdout__, flush=True)
    for line in sys.stdin:
        seconds = generate(json.loads(line))
        print(json.dumps({"seconds": seconds}), file=sys.__stdout__, flush=True)


class Turns:
    """One training loop's."""

    def __init__(self, **about: str):
        self._about = about
        self._start: float | None = None

    def wait(self) -> None:
        """Called where an iteration begins and nothing of the one before is still running: says how long
        that took, and returns when the next may begin. Ends the process when there is none."""
        self.end()
        if not sys.stdin.readline():
            os._exit(0)
        self._start = time.perf_counter()

    def end(self) -> None:
        """Called after the last iteration: says how long that took."""
        if self._start is None:
            said = self._about
        else:
            said = {"seconds": time.perf_counter() - self._start}
        print(json.dumps(said), file=sys.__stdout__, flush=True)
