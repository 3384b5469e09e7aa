"""run.html: how a run goes, rendered from the files in its folder.

Knows files of a run. Does not know what the run computes.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from pat_jax.common.files import replace_text
from pat_jax.common.html.render import rendered
from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.run.files.folder import CONFIG_FILE, METRICS_FILE, PAGE_FILE
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.logging.page import curves, numbers
from pat_jax.run.logging.page.panels import OTHERS, Rows
from pat_jax.run.logging.rollout_files import KeptRollout, KeptRollouts, read_rollouts
from pat_jax.run.logging.samples import Sample, read_samples

TEMPLATE = Path(__file__).with_name("run.html.jinja")
SHARE = 0.01  # most of a run's time that may go into writing its page

log = logging.getLogger(__name__)


class RunPage:
    """The page of a running run, with the rollouts that it shows."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._rollouts = KeptRollouts(folder)
        self._not_before = -math.inf  # seconds of time.monotonic()

    @contextmanager
    def kept(self, steps_done: int) -> Iterator[None]:
        """Writes the page on entry and on exit, also after an error."""
        self._rollouts.resume(steps_done)
        self.write()
        try:
            yield
        finally:
            self.write_now()

    def rollout(self, step: int, trace: RolloutTrace) -> None:
        self._rollouts.add(step, trace)

    def write_now(self) -> None:
        """Writes the page also if `write` would skip that."""
        self._not_before = -math.inf
        self.write()

    def write(self) -> None:
        """Writes the page, unless that would take more than SHARE of the run's time. A failure,
        such as a full disk, costs a line of the log."""
        start = time.monotonic()
        if start < self._not_before:
            return
        try:
            self._rollouts.save()
            replace_text(self._folder / PAGE_FILE, run_page(self._folder))
        except Exception as error:  # the page must never end a run
            first, *_ = f"{error}".splitlines() or [""]
            log.warning("%s was not written (%s: %s)", PAGE_FILE, type(error).__name__, first)
        now = time.monotonic()
        self._not_before = now + (now - start) / SHARE


def run_page(folder: Path) -> str:
    """Renders the page from those files of a run's folder that exist."""
    rows = rows_in(folder)
    return rendered(
        TEMPLATE,
        name=folder.resolve().name,
        now=f"{datetime.now():%Y-%m-%d %H:%M}",
        read_options=lambda: options_in(folder),
        file_name=lambda path: Path(str(path)).name,
        rows=rows,
        curves=curves,
        numbers=numbers,
        by_title=_by_title,
        conversations=_conversations,
        rewards_range=_rewards_range,
        OTHERS=OTHERS,
        read_rollouts=lambda: read_rollouts(folder),
        read_samples=lambda: read_samples(folder),
        drawn=_drawn,
    )


def _drawn(section: Callable[[], str]) -> str | None:
    """Returns None if the section raises, such as for a number that no axis can show. The other
    sections are still drawn."""
    try:
        return section()
    except Exception as error:
        log.warning("a section of %s is left out (%r)", PAGE_FILE, error)
        return None


def rows_in(folder: Path) -> Rows:
    """Returns the rows of a run's metrics; none if it has not written any."""
    path = folder / METRICS_FILE
    return read_metrics(path) if path.is_file() else []


def options_in(folder: Path) -> dict[str, Any]:
    """Returns the options of a run by section and name, whatever options its version had. Raises
    YAMLError if its file is damaged."""
    path = folder / CONFIG_FILE
    found = yaml.safe_load(path.read_bytes()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _by_title(kept: Mapping[str, KeptRollout]) -> dict[str, KeptRollout]:
    """Merges equal rollouts: one that is both the first and the slowest appears once."""
    names: dict[int, list[str]] = {}
    for name, one in kept.items():
        names.setdefault(one.step, []).append(name)
    return {" and ".join(same): kept[same[0]] for same in names.values()}


def _conversations(few: Sequence[Sample]) -> Iterator[tuple[Sample, list[tuple[Sample, int]]]]:
    """Yields a sample of each prompt, and the prompt's distinct responses with their counts."""
    for _, group in groupby(few, key=lambda sample: (sample.prompt, sample.answer)):
        every = [*group]
        once = [sample for i, sample in enumerate(every) if sample not in every[:i]]
        yield every[0], [(sample, every.count(sample)) for sample in once]


def _rewards_range(by_step: Mapping[int, Sequence[Sample]]) -> tuple[float, float]:
    rewards = [x.reward for few in by_step.values() for x in few if x.reward is not None]
    return min(rewards, default=0.0), max(rewards, default=0.0)
