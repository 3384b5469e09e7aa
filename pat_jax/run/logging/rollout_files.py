"""The rollouts of a run that its page shows: the first, the slowest and the newest."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pat_jax.common.files import replace_text
from pat_jax.common.json_text import of_json
from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.run.checkpoints.json_state import gone_on_with, read_kept
from pat_jax.run.files.folder import ROLLOUTS_FILE

FIRST, SLOWEST, NEWEST = NAMES = "first", "slowest", "newest"


@dataclass(frozen=True)
class KeptRollout:
    step: int  # step of the run, from 1
    trace: RolloutTrace


class KeptRollouts:
    def __init__(self, folder: Path):
        self._folder = folder
        self._kept = dict[str, KeptRollout]()
        self._is_written = True

    def resume(self, steps_done: int) -> None:
        """Loads the rollouts of the run's folder, except those of steps that are repeated."""
        found = gone_on_with(read_rollouts, self._folder, "rollouts") if steps_done else {}
        self._kept = {name: one for name, one in found.items() if one.step <= steps_done}
        self._is_written = len(self._kept) == len(found)
        if known := self._kept.values():
            self._kept.setdefault(SLOWEST, max(known, key=lambda one: one.trace.total_s))
            self._kept.setdefault(NEWEST, max(known, key=lambda one: one.step))

    def add(self, step: int, trace: RolloutTrace) -> None:
        """Keeps the rollout as the newest, and as first or slowest if it is that. Ignores one
        without decode steps."""
        if not trace.running:
            return
        one = KeptRollout(step, trace)
        slowest = self._kept.get(SLOWEST)
        self._kept.setdefault(FIRST, one)
        if slowest is None or trace.total_s > slowest.trace.total_s:
            self._kept[SLOWEST] = one
        self._kept[NEWEST] = one
        self._is_written = False

    def save(self) -> None:
        if not self._is_written:
            rows = {name: asdict(one) for name, one in self._kept.items()}
            replace_text(self._folder / ROLLOUTS_FILE, f"{json.dumps(rows)}\n")
            self._is_written = True


def read_rollouts(folder: Path) -> Mapping[str, KeptRollout]:
    """Returns the rollouts by `NAMES`, or none if there is no file. Raises UserError if the file is
    not as a run writes it."""
    return read_kept(folder / ROLLOUTS_FILE, "rollouts of its steps", _rollouts, {})


def _rollouts(rows: Any) -> Mapping[str, KeptRollout]:
    return {name: of_json(KeptRollout, rows[name]) for name in NAMES if name in rows}
