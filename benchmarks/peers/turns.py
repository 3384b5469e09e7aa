"""Iterations by turns: a training loop that is told when to begin each of its iterations.

Run inside the processes of `iteration_vs_peers.py`, whose environments share nothing but this file.
"""

import json
import os
import sys
import time


class Turns:
    """Standard output carries one JSON line an iteration; what a loop prints goes to standard error."""

    def __init__(self, **about: str):
        sys.stdout = sys.stderr
        self._about = about
        self._start: float | None = None

    def wait(self) -> None:
        """Called where an iteration begins and nothing of the one before is still running: says how long
        that took, and returns when the next may begin. Ends the process when there is none."""
        if self._start is None:
            said = self._about
        else:
            said = {"seconds": time.perf_counter() - self._start}
        print(json.dumps(said), file=sys.__stdout__, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._start = time.perf_counter()
