"""The evaluate command at its smallest, in this process, and what it leaves."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from compilations import counted_compilations
from runs import json_lines

from pat_jax import evaluate
from pat_jax.commands import evaluate as body
from pat_jax.common.run_command import run_command
from pat_jax.evaluation.problem_sets import ProblemSets
from pat_jax.run.evaluation import Evaluator

SMALL = "--batch 8 --max_prompt_length 160 --max_completion_length 24 --layout dp2tp1 --devices 2"
REWARD = """
def even(prompts, completions, answer, **columns):
    return [float(len(text) % 2 == 0) for text in completions]

def length(prompts, completions, **columns):
    return [len(text) / 100 for text in completions]

def none(prompts, completions, **columns):
    return [None if len(text) % 3 == 0 else 1.0 for text in completions]
"""


def evaluate_here(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *options: str,
    out: str = "out",
    small: bool = True,
    fitted: bool = False,
) -> dict[str, Any]:
    """Results of the command, which runs in `folder` and writes to `out` there.

    Args:
      small: with the options of the smallest one.
      fitted: with an engine for these problems alone; else all share their programs.
    """
    if not fitted:
        monkeypatch.setattr(ProblemSets, "fitted", lambda problem_sets, rollout, *_: rollout)
    (folder / "mine.py").write_text(REWARD)
    argv = ["evaluate", "--out", str(folder / out), *(SMALL.split() if small else ()), *options]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(body, "configure", lambda count: jax.devices()[:count])
    monkeypatch.chdir(folder)
    run_command(evaluate.main)
    return json.loads((folder / out / "results.json").read_text())


def compiled_during(patch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled from now on while problems are generated and scored."""
    compiled, whole = list[str](), Evaluator.evaluate

    def counting(*given: Any) -> Any:
        with counted_compilations() as events:
            found = whole(*given)
        compiled.extend(events)
        return found

    patch.setattr(Evaluator, "evaluate", counting)
    return compiled


def completions(folder: Path) -> list[dict[str, Any]]:
    return json_lines(folder / "completions.jsonl")
