"""Of several processes the first one's planner decides, and it alone hears what came of it."""

from typing import Any

import pytest

from pat_jax.common.hosts.together import Company
from pat_jax.engine import agreed_planner
from pat_jax.engine.agreed_planner import AgreedPlanner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Split


class Hears(FixedLayout):
    def __init__(self):
        super().__init__(Split(1, 1))
        self.heard: list[object] = []

    def observe(self, outcome: Any) -> None:
        self.heard.append(outcome)


@pytest.mark.parametrize(("index", "heard"), [(0, ["a switch"]), (1, [])])
def test_who_decides_hears_what_came_of_it(monkeypatch, index: int, heard: list[object]):
    monkeypatch.setattr(agreed_planner, "company", lambda: Company(index, 2))
    planner, outcome = Hears(), "a switch"
    AgreedPlanner(planner).observe(outcome)  # pyright: ignore[reportArgumentType]
    assert planner.heard == heard
