"""docs/metrics.md tells of every metric that the code writes, and of no other."""

import ast
import re
from functools import cache
from typing import get_args, get_type_hints

import numpy as np
import pytest
from metrics_table import STAND_INS, told_metrics, untold
from runs import ROOT

from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.value_loss import ValueLoss
from pat_jax.rl.rewards.outcome import Cause

NAMESPACES = "reward|rollout|train|critic|eval|progress|memory|timing|placement"
ROLES = ("train", "critic")  # whose name is before what any loss measures


@cache
def literals() -> frozenset[str]:
    """Every text in the code that writes metrics, parts of f-strings too."""
    found = set()
    folders = [
        ROOT / "rl",
        *(ROOT / "pat_jax" / name for name in ("run", "common", "engine", "training")),
    ]
    for folder in folders:
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return frozenset(found)


def is_written(name: str) -> bool:
    """Whole, or in two parts that are put together, or around what stand-ins stand for."""
    if any(word in name for word in STAND_INS):
        parts = [part.strip("/") for part in re.split("|".join(STAND_INS), name)]
        return all(is_part(part) for part in parts if part)
    if name.partition("/")[0] in ROLES and is_part(name):
        return True
    heads = [text for text in literals() if re.match(rf"({NAMESPACES})/", text)]
    tails = (name.removeprefix(head) for head in heads if name.startswith(head))
    return any(not tail or tail in literals() for tail in tails)


def is_part(part: str) -> bool:
    """A text by itself, or a namespace and one."""
    namespace, _, rest = part.partition("/")
    alone = {text.strip("/") for text in literals()}
    return part in alone or {namespace, rest} <= alone


def test_the_table_has_each_name_once_and_all_columns():
    rows = told_metrics()
    names = [row[0] for row in rows]
    assert len(names) == len(set(names)) > 60
    assert all(len(row) == 5 and row[2] and row[3] and row[4] for row in rows)


def test_what_the_code_names_is_told():
    whole = {text for text in literals() if re.fullmatch(rf"({NAMESPACES})/[a-z]\w*[a-z0-9]", text)}
    assert "train/learning_rate" in whole and untold(whole) == set()


@pytest.mark.parametrize("correction", get_args(get_type_hints(PolicyLoss)["correction"]))
def test_what_a_loss_measures_is_told(correction: str):
    assert untold({f"train/{name}" for name in PolicyLoss(correction=correction).metrics}) == set()  # pyright: ignore[reportArgumentType]


def test_what_a_critic_measures_is_told():
    loss = ValueLoss()
    reported = loss.summary([{name: np.ones((), np.float32) for name in ("weight", *loss.metrics)}])
    assert "explained_variance" in reported
    assert untold({f"critic/{name}" for name in reported}) == set()


@pytest.mark.parametrize("name", [row[0] for row in told_metrics()])
def test_what_is_told_is_written(name: str):
    assert is_written(name)


def test_causes_are_told():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"`{cause}`" in text for cause in Cause)
