"""Tails of rollouts that pay, whatever the planner believes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pat_jax.profiling.capacity.placing import Placing
from pat_jax.profiling.placement.priced import Priced


def make_tails_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the seconds of tails half of what they are."""
    tails = Placing.tails.fget
    assert tails

    def faster(self: Placing) -> Iterator[Priced]:
        for one in tails(self):
            yield replace(one, seconds=(one.seconds or 0) / 2, worst_s=(one.worst_s or 0) / 2)

    monkeypatch.setattr(Placing, "tails", property(faster))
