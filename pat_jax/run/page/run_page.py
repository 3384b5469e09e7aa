"""run.html: how a run goes, made of what its folder holds.

Knows files of a run. Does not know what the run computes.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import yaml

from pat_jax.common.files import replace_text
from pat_jax.common.html.page import panels, section, tiles, web_page
from pat_jax.engine.trace import RolloutTrace
from pat_jax.run.curves import Rows
from pat_jax.run.folder import PAGE_FILE
from pat_jax.run.metrics import METRICS_FILE, read_metrics
from pat_jax.run.page.curves import curves, layouts
from pat_jax.run.page.numbers import drafts, facts, failed_rewards
from pat_jax.run.page.rollouts import rollouts
from pat_jax.run.page.samples import samples
from pat_jax.run.page.shown_switch import shown_switch
from pat_jax.run.rollouts import KeptRollouts, read_rollouts
from pat_jax.run.samples_file import read_samples
from pat_jax.run.shown_switch import read_switch

SHARE = 0.01  # of a run's time that its page may take: it is made of all of its metrics

log = logging.getLogger(__name__)


class RunPage:
    """The page of a run that goes on, and the rollouts that are kept for it."""

    def __init__(self, folder: Path):
        self._folder, self._rollouts = folder, KeptRollouts(folder)
        self._not_before = -math.inf  # seconds of a clock

    @contextmanager
    def kept(self, steps_done: int) -> Iterator[None]:
        """Written before and after what is done inside, whatever ends it."""
        self._rollouts.resume(steps_done)
        self.write()
        try:
            yield
        finally:
            self.write_now()

    def rollout(self, step: int, trace: RolloutTrace) -> None:
        self._rollouts.add(step, trace)

    def write_now(self) -> None:
        """Whatever share of the time it takes."""
        self._not_before = -math.inf
        self.write()

    def write(self) -> None:
        """If that takes no more than SHARE of the time. A failure, such as a full disk, costs a line of the
        log."""
        start = time.monotonic()
        if start < self._not_before:
            return
        try:
            self._rollouts.save()
            replace_text(self._folder / PAGE_FILE, run_page(self._folder))
        except Exception as error:  # whatever it is, no run is to end by its page
            first, *_ = f"{error}".splitlines() or [""]
            log.warning("%s was not written (%s: %s)", PAGE_FILE, type(error).__name__, first)
        now = time.monotonic()
        self._not_before = now + (now - start) / SHARE


def run_page(folder: Path) -> str:
    """Of the files in a run's folder, as far as they are there."""
    path = folder / METRICS_FILE
    rows = read_metrics(path) if path.is_file() else []
    name = folder.resolve().name
    header = (
        f"<header><p>A run of pat_jax</p><h1>{escape(name)}</h1>"
        f"<p>{escape(_subject(folder, rows))}</p></header>"
    )
    sections = (
        lambda: tiles(facts(rows)),
        lambda: _over_the_steps(rows),
        lambda: rollouts(read_rollouts(folder), rows),
        lambda: shown_switch(read_switch(folder)),
        lambda: drafts(rows),
        lambda: failed_rewards(rows),
        lambda: samples(read_samples(folder)),
    )
    return web_page(f"{name}: a run of pat_jax", header + "".join(map(_drawn, sections)))


def _drawn(make: Callable[[], str]) -> str:
    """A section; one that cannot be drawn, by a number that no axis has, takes no other with it."""
    try:
        return make()
    except Exception as error:
        log.warning("a section of %s is left out (%r)", PAGE_FILE, error)
        return "<p>A section is left out here: run.log says why.</p>"


def _over_the_steps(rows: Rows) -> str:
    if not (found := [*curves(rows)]):
        return ""
    told = (
        "docs/metrics.md explains each name. A gap: not measured, or of nothing. A band: the 95 % "
        "interval."
    )
    return section("Over the steps", panels(found), layouts(rows), source=told)


def _subject(folder: Path, rows: Rows) -> str:
    """What learns of what, and how far it is."""
    options = _options(folder / "config.yaml")
    model, data = options.get("model"), options.get("data")
    files = data.get("files") if isinstance(data, dict) else None
    told = [f"model {Path(model).name}"] if isinstance(model, str) else []
    if isinstance(files, list):
        told.append(f"data {', '.join(Path(str(each)).name for each in files)}")
    steps, last = options.get("steps"), max([0, *(row["step"] for row in rows)])
    told.append(f"step {last:,}" + (f" of {steps:,}" if isinstance(steps, int) and steps else ""))
    return f"{'; '.join(told)}. Written {datetime.now():%Y-%m-%d %H:%M}."


def _options(path: Path) -> Mapping[str, Any]:
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return options if isinstance(options, dict) else {}
