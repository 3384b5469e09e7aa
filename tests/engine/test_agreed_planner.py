"""Of several processes the first one's planner decides, and it alone hears what came of it."""

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.engine import agreed_planner
from pat_jax.engine.agreed_planner import AgreedPlanner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Load, Plan, Split


class Hears(FixedLayout):
    def __init__(self):
        super().__init__(Split(1, 1))
        self.heard: list[object] = []

    def observe(self, outcome: Any) -> None:
        self.heard.append(outcome)


@pytest.mark.parametrize(("index", "heard"), [(0, ["a switch"]), (1, [])])
def test_who_decides_hears_what_came_of_it(monkeypatch, index: int, heard: list[object]):
    monkeypatch.setattr(agreed_planner, "process_group", lambda: ProcessGroup(index, 2))
    planner, outcome = Hears(), "a switch"
    AgreedPlanner(planner).observe(outcome)  # pyright: ignore[reportArgumentType]
    assert planner.heard == heard


def test_the_others_move_the_same_sequences(monkeypatch):
    """The plan of the first process comes to the others as a pickle, its replicas included."""

    class First(FixedLayout):
        def decide(self, load: Load, current: Split, options=()) -> Plan:
            plan = super().decide(load, current, options)
            return replace(plan, replica=options[0], reason=f"{load.running} in {current}")

    wire = SimpleNamespace(agree=lambda name, make: pickle.loads(pickle.dumps(make())))
    monkeypatch.setattr(agreed_planner, "process_group", lambda: wire)
    split, zeros = Split(2, 1), np.zeros(3, int)
    planner = AgreedPlanner(First(split))
    plan = planner.decide(Load(zeros, zeros, zeros, zeros), split, [np.array([0, 1, 0])])
    assert plan.replica is not None and plan.replica.tolist() == [0, 1, 0]
    assert plan.moves_from(split) and plan.reason == "3 in dp2tp1"
