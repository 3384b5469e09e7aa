"""What a checkpoint keeps of a run that is stopped in the middle of a step."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pat_jax.engine.record.report import RolloutReport
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.data.epochs import Cursor
from pat_jax.run.loop import Run
from pat_jax.run.process.steps import Steps
from pat_jax.run.totals import Totals

TWO, FOUR = Totals(2, 20, Cursor(0, 8)), Totals(4, 44, Cursor(1, 4))


def refuse(batches: int, size: int) -> Cursor:
    raise AssertionError("the checkpoint says where it was")


@pytest.fixture
def run() -> Any:
    """After two whole steps of a batch each, in the middle of a third that has drawn two more."""
    run: Any = Run.__new__(Run)
    run.setup = SimpleNamespace(
        task=SimpleNamespace(checksums={"train": 7}), config=SimpleNamespace(log_samples_every=0)
    )
    run.learner = SimpleNamespace(kept={"train": "state"}, base_checksum=None)
    run.generator = SimpleNamespace(lengths=LengthModel.empty(8))
    run.collector = SimpleNamespace(totals=TWO)
    run.open, run.unmoved = Mock(), Mock()
    run.open.saves.is_due = lambda step: False
    steps: Any = Steps(run.open, Mock(), run.kept)
    run.steps, run.written = steps, []
    steps.metrics = SimpleNamespace(write=lambda *row: run.written.append(row))
    run.has_learned(2, {})
    run.collector.totals = FOUR
    learned = run.generator.lengths.updated(np.array([3]), np.array([False]), np.array([0]))
    run.generator.lengths = learned
    return run


def test_what_an_abandoned_step_has_drawn_is_drawn_again(run):
    step, (_, meta) = run.steps.last()
    assert step == 2
    assert Totals.from_json(meta, 2, 4, refuse) == TWO and meta["problems"] == {"train": 7}
    assert meta["lengths"] == LengthModel.empty(8).to_json()


def test_what_a_whole_step_has_drawn_is_not(run):
    """… though what follows in it fails; what was measured is written."""
    measured = {"reward/mean": 1.0}
    run.has_learned(3, measured)
    measured["train/loss"] = 2.0
    step, (_, meta) = run.steps.last()
    assert step == 3 and run.written == [(3, {"reward/mean": 1.0, "train/loss": 2.0})]
    assert Totals.from_json(meta, 3, 4, refuse) == FOUR
    assert meta["lengths"] == run.generator.lengths.to_json() != LengthModel.empty(8).to_json()


def test_what_was_measured_is_written_once(run):
    run.has_learned(3, {"reward/mean": 1.0})
    run.end_step(3, SimpleNamespace(report=RolloutReport()), {"reward/mean": 1.0})
    run.steps.last()
    assert [step for step, _ in run.written] == [3]
