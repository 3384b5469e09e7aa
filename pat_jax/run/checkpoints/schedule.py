"""Decides when a run's checkpoints are written, and handles saves that fail.

Knows steps and what to tell the user. Does not know files (`checkpoint.py`) or what is saved.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.run.checkpoints.checkpoint import Checkpointer, SaveError, is_gone

PAUSES_S = (0.0, 2.0, 10.0)  # before each further attempt at the last checkpoint of a run


@dataclass
class Saves:
    """The checkpoints of a run of `steps`: one every `every` steps, and one at its end. A failed
    save is reported, and each further step is saved until one succeeds; training continues."""

    checkpoints: Checkpointer
    every: int
    steps: int
    notify: Callable[[str], None]
    _has_failed: bool = False

    def is_due(self, step: int) -> bool:
        """Returns whether `step` is to be saved, after checking whether the last save failed."""
        self._guarded(self.checkpoints.check)
        return self._has_failed or step % self.every == 0 or step == self.steps

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        self._guarded(self.checkpoints.wait)  # if the last save failed, this one still begins
        self._has_failed = False
        self._guarded(lambda: self.checkpoints.save(step, state, meta))

    def end(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Returns when `step` is on disk. Raises UserError if several attempts to save it fail."""
        for pause in (*PAUSES_S, None):
            try:
                self.checkpoints.save(step, state, meta)
                self.checkpoints.wait()
                return
            except SaveError as error:
                if pause is None:
                    raise UserError(f"{error}; make room, then go on with --resume.") from None
                self.notify(f"{error}; it is tried again in {pause:.0f} s")
                time.sleep(pause)

    def stop(self, step: int, state: Any, meta: Mapping[str, Any]) -> str:
        """Saves `step`, unless it is saved already. Returns a clause about it for the user."""
        if is_gone(state):
            return f"the policy after step {step} went into an update that failed, and {self.on_disk()}"
        try:
            self.end(step, state, meta)
        except UserError as error:
            return str(error).removesuffix(".")
        return f"the policy after step {step} is saved"

    def on_disk(self) -> str:
        """Returns a clause about the newest complete checkpoint on disk. Looks at files only, so
        that it can be called at any moment."""
        try:
            step = self.checkpoints.newest_on_disk()
        except OSError as error:
            return f"the checkpoints cannot be read ({error.strerror})"
        stays = f"the checkpoint of step {step} stays"
        return "no checkpoint is written yet" if step is None else stays

    def _guarded(self, attempt: Callable[[], None]) -> None:
        try:
            attempt()
        except SaveError as error:
            self._has_failed = True
            self.notify(f"{error}; training goes on, and the next step is saved.")
