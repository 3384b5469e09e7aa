"""What a checkpoint keeps of a run that is stopped in the middle of a step."""

from types import SimpleNamespace
from typing import Any

import pytest

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.epochs import Cursor
from pat_jax.run.loop import Run
from pat_jax.run.totals import Totals

BEFORE, AFTER = Totals(2, 20, Cursor(0, 8)), Totals(4, 44, Cursor(1, 4))


def refuse(batches: int, size: int) -> Cursor:
    raise AssertionError("the checkpoint says where it was")


@pytest.fixture
def run() -> Any:
    """After two whole steps of a batch each, in the middle of a third that has drawn two more."""
    run: Any = Run.__new__(Run)
    run.task = SimpleNamespace(checksums={"train": 7})
    run.state, run.reference, run.base_checksum = "state", None, None
    run.generator = SimpleNamespace(lengths=LengthModel.empty(8))
    run.totals, run.collector = BEFORE, SimpleNamespace(totals=AFTER)
    return run


def test_batches_of_an_abandoned_step_are_drawn_again(run):
    _, meta = run.kept()
    assert Totals.from_json(meta, 2, 4, refuse) == BEFORE and meta["problems"] == {"train": 7}


def test_those_of_a_whole_step_are_not(run):
    run.metrics = run.progress = SimpleNamespace(write=lambda *_: None, step=lambda *_: None)
    run.config = SimpleNamespace(log_samples_every=0)
    run.open = SimpleNamespace(saves=SimpleNamespace(is_due=lambda step: False))
    run.end_step(3, SimpleNamespace(report=None), {})
    assert Totals.from_json(run.kept()[1], 3, 4, refuse) == AFTER
