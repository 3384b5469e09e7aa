"""A run with several rewards: what each gives, its sum, and where a person finds both."""

from pathlib import Path

import numpy as np
import pytest
from runs import TINY, json_lines, run

from pat_jax.run.logging.metrics import read_metrics

REWARDS = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": solution_str.count(ground_truth[0]), "length": len(solution_str)}

def brevity(completion_ids, finish_reason, **kwargs):
    return [len(ids) if end == "length" else None for ids, end in zip(completion_ids, finish_reason)]
"""


@pytest.mark.slow  # a whole command
def test_a_run_with_several_rewards(tmp_path: Path):
    (tmp_path / "mine.py").write_text(REWARDS)
    options = "--reward mine:compute_score mine:brevity exact --reward_weights 2 -0.5 8"
    options += " --warm_start.steps 0 --log_completions --run_dir here"
    output = run(*TINY, *options.split(), cwd=tmp_path)
    lines = json_lines(tmp_path / "here" / "completions.jsonl")
    said = [line for line in lines if line["kind"] == "train"]
    assert len(said) == 2 * 8
    for line in said:
        given, is_cut = line["rewards"], line["finish"] == "length"
        assert given.keys() == {"compute_score", "brevity", "exact"}
        assert given["brevity"] == (line["tokens"] if is_cut else None)
        wanted = 2 * given["compute_score"] - 0.5 * (given["brevity"] or 0) + 8 * given["exact"]
        assert line["reward"] == wanted
    for step, row in enumerate(read_metrics(tmp_path / "here" / "metrics.jsonl")[1:], start=1):
        mine = [line for line in said if line["step"] == step]
        assert row["reward/mean"] == pytest.approx(np.mean([line["reward"] for line in mine]))
        for name in ("compute_score", "exact"):
            mean = np.mean([line["rewards"][name] for line in mine])
            assert row[f"reward/{name}/mean"] == pytest.approx(mean)
        ended = sum(line["finish"] == "stop" for line in mine)
        assert row.get("reward/brevity/failed/none", 0) == ended and row["reward/failed"] == 0
        lengths = [len(line["completion"]) for line in mine]
        assert row["reward/compute_score/length"] == pytest.approx(np.mean(lengths))
        assert f"step {step}/2  reward {row['reward/mean']:6.3f} (compute_score " in output
        assert row["train/grad_norm"] > 0
    assert "could not be scored" not in output
