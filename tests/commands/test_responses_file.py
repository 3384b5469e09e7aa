"""`--responses_file` of plan and simulate: what drafts are worth, and lengths, from recorded responses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from profiles import save_profile

from pat_jax import simulate
from pat_jax.commands import plan
from pat_jax.commands import simulate as body
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse, run_command
from pat_jax.profiling.capacity.page import plan_text
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import planned
from pat_jax.profiling.capacity.report import PlanReport

ASKED = ["--model", "tiny", "--target", "h100:8", "--responses", "32", "--rollouts", "1"]
ASKED += ["--max_completion_length", "1024", "--max_prompt_length", "64", "--data", "nowhere"]
ASKED += ["--prompt_tokens", "16"]


@pytest.fixture(autouse=True)
def of_these_devices(monkeypatch):
    """The tests have their devices already."""
    monkeypatch.setattr(body, "configure", lambda count: None)


def report_of(*options: str) -> PlanReport:
    config = parse([*ASKED, *options], PlanConfig, prog="plan", presets=None)
    return planned(plan.question_of(config, "the command"), None)


def recorded(folder: Path, samples: int, *, length: int = 300) -> Path:
    """Responses that say ten tokens again and again, each prompt others, as generate writes them."""
    rng, rows = np.random.default_rng(0), []
    for line in range(1, 7):
        motif = rng.integers(2, 120, 10)
        for sample in range(samples):
            tokens = np.resize(motif, length - 20 * sample).tolist()
            rows.append({"line": line, "sample": sample, "text": None, "token_ids": tokens})
    path = folder / "said.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_plan_counts_drafts_and_lengths_in_it(tmp_path: Path):
    found = report_of("--responses_file", str(recorded(tmp_path, 4)))
    assert found.lengths.source == "said.jsonl, 24 responses"
    assert max(found.comparison.longest) <= 300
    own, siblings = found.comparison.by_source
    built_in = report_of("--lengths", "short").comparison.by_source
    assert own.tokens_per_step[0] > built_in[0].tokens_per_step[0]
    assert siblings.tokens_per_step[0] >= 0.95 * own.tokens_per_step[0]
    told = plan_text(found)
    assert "counted in said.jsonl: 24 responses to 6 prompts, 6,480 tokens" in told
    assert "built in: counted" not in told


def test_lengths_that_are_given_win(tmp_path: Path):
    found = report_of("--responses_file", str(recorded(tmp_path, 2)), "--lengths", "short")
    assert found.lengths.source.startswith("built-in 'short'")


def test_without_siblings_their_row_is_left_out_and_said(tmp_path: Path):
    found = report_of("--responses_file", str(recorded(tmp_path, 1)))
    (own,) = found.comparison.by_source
    assert own.name == "own text"
    assert "said.jsonl has one response to each prompt" in plan_text(found)


def test_what_is_wrong_is_said_before_anything_is_replayed(tmp_path: Path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": "a", "text": "b"}\n')
    with pytest.raises(UserError, match=r"texts.jsonl, line 1, has no token_ids or tokens"):
        report_of("--responses_file", str(path))
    path.write_text('{"prompt": "a", "token_ids": [500]}\n')
    with pytest.raises(UserError, match=r"has the token 500: expected ids from 0 to 127"):
        report_of("--responses_file", str(path))


def test_simulate_counts_them_too(tmp_path: Path, monkeypatch, capsys):
    profile, out = save_profile(tmp_path / "profile.json", {7: 1.1}), tmp_path / "out.json"
    options = ["--responses", "32", "--max_completion_length", "128", "--prompt_tokens", "16"]
    options += ["--responses_file", str(recorded(tmp_path, 4, length=120)), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["simulate", "--profile", str(profile), *options])
    run_command(simulate.main)
    printed = capsys.readouterr().out
    assert "lengths: said.jsonl, 24 responses" in printed and "drafts from" in printed
    assert "counted in said.jsonl: 24 responses to 6 prompts" in printed
    (answer,) = json.loads(out.read_text())["answers"]
    assert [one["name"] for one in answer["by_source"]] == ["own text", "own text, siblings"]
