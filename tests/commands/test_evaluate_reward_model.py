"""An evaluation by a reward model: its scores, and nothing compiled while it generates and scores."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compilations import counted_compilations
from evaluations import completions, evaluate_here
from row_writing import write_lines
from runs import QWEN3, write_checkpoint

from pat_jax.run.evaluation import Evaluator


def test_a_policy_is_evaluated_by_a_reward_model(tmp_path: Path, monkeypatch):
    model = write_checkpoint(tmp_path / "model")
    judge = write_checkpoint(tmp_path / "judge", replace(QWEN3, head="scalar"))
    chats = [[{"role": "system", "content": "Be brief."}, *asked(f"Who is {i}?")] for i in range(4)]
    data = write_lines(tmp_path / "chats.jsonl", *({"prompt": chat} for chat in chats))
    compiled, evaluate = [], Evaluator.evaluate

    def counting(*given: Any) -> Any:
        with counted_compilations() as found:
            result = evaluate(*given)
        compiled.extend(found)
        return result

    monkeypatch.setattr(Evaluator, "evaluate", counting)
    options = ["--model", str(model), "--data", str(data), "--num_generations", "2"]
    options += ["--reward", f"model:{judge}", "--reward_model.max_length", "256"]
    found = evaluate_here(monkeypatch, tmp_path, *options)["all"]
    assert compiled == []
    rewards = [line["reward"] for line in completions(tmp_path / "out")]
    assert len(rewards) == 8 and np.ptp(rewards) > 0
    assert found["mean"]["value"] == pytest.approx(np.mean(rewards)) and found["failed"] == 0


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]
