"""Drafts of `generate` and of a session: no result is another, and it is said what they gave."""

import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from runs import write_checkpoint

from pat_jax import generate
from pat_jax.commands import generate as body
from pat_jax.common.run_command import run_command
from pat_jax.engine.warm_up.timings import Timed
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.run.start import prepare, profiles

SMALL = ("--batch", "4", "--max_length", "128", "--layout", "dp2tp1", "--devices", "2")
SUFFIX = ("--speculation.source", "suffix", "--speculation.num_draft_tokens", "7")
# Their own text repeats itself soon.
GREEDY = ("--temperature", "0", "--max_completion_length", "48")
REASON = "speculation: drafts of up to 7 tokens from a response's own text and others to its prompt"
CAME = r"drafts in \d+ steps: acceptance length [\d.]+ \([\d.]+ predicted\), saved "


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("drafts") / "model")


@pytest.fixture
def drafts_pay(monkeypatch) -> None:
    """As on a machine where verifying is free."""
    measure = Warmup.measure

    def measured(self: Warmup, load) -> LatencyModel:
        found = measure(self, load)
        return replace(found, verify_table=dict.fromkeys(found.verify_table, 1e-9))

    monkeypatch.setattr(Warmup, "measure", measured)


@pytest.fixture
def generated(model: Path, tmp_path: Path, monkeypatch) -> Callable[..., list[dict]]:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text, "n": 2} for text in ("the cat", "a dog", "more")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(*options: str) -> list[dict]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        names = ["--model", str(model), "--prompts", str(prompts), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["generate", *names, *SMALL, *GREEDY, *options])
        monkeypatch.setattr(body, "configure", lambda count: jax.devices()[:count])
        run_command(generate.main)
        return [json.loads(line) for line in out.read_bytes().splitlines()]

    return run


def test_generate_says_what_is_drafted_and_what_came(generated, drafts_pay, capsys):
    plain = generated("--speculation.source", "none")
    output = capsys.readouterr().err
    assert "speculation: none asked for" in output and "drafts in" not in output
    assert generated(*SUFFIX) == plain and len(plain) == 6
    output = capsys.readouterr().err
    assert REASON in output
    (came,) = re.findall(r"drafts in (\d+) steps: acceptance length ([\d.]+)", output)
    assert int(came[0]) > 0 and float(came[1]) > 1
    assert re.search(CAME, output)


@pytest.mark.slow  # two more engines
def test_what_was_measured_is_kept_and_of_its_drafts_none_are_made(
    generated, tmp_path, capsys, monkeypatch
):
    """The second run measures a sample, and has no drafts though the profile knows of some."""
    for module in (prepare, profiles):
        monkeypatch.setattr(module, "KEPT_DIR", tmp_path / "kept")
    ran, note = [], Warmup._note

    def counted(self: Warmup, *programs: Timed) -> None:
        ran.extend(program.table for program in programs)
        note(self, *programs)

    monkeypatch.setattr(Warmup, "_note", counted)
    output = generated(*SUFFIX)
    (kept,) = (tmp_path / "kept").iterdir()
    latency = json.loads(kept.read_text())["latency"]
    assert latency["verify_table"] and ran.count("prefill_table") == 1
    ran.clear()
    assert generated("--speculation.source", "auto") == output
    assert ran == ["decode_table"]
    told = capsys.readouterr().err
    assert "speculation: none on a CPU" in told and "drafts in" not in told.splitlines()[-1]


@pytest.mark.slow  # one more engine
def test_a_session_tells_the_logger_and_has_the_counts(
    model: Path, drafts_pay, monkeypatch, caplog
):
    monkeypatch.setattr(body, "configure", lambda count: jax.devices()[:count])
    options = {"batch": 4, "max_length": 128, "layout": "dp2tp1", "devices": 2, "temperature": 0.0}
    speculation = {"speculation": {"source": "suffix", "num_draft_tokens": [7]}}
    with caplog.at_level(logging.INFO, logger="pat_jax"):
        session = generate.session({"model": str(model), **options, **speculation})
        session.generate(["the cat", "a dog"], n=2, max_tokens=48)
    assert REASON in caplog.text and re.search(CAME, caplog.text)
    drafts = session.rollout.drafts
    assert sum(drafts.drafted) >= sum(drafts.accepted) > 0
    assert sum(burst[0][1] + burst[1][1] for burst in drafts.by_source) == sum(drafts.accepted)
    assert drafts.saving_s is not None and drafts.predicted_saving_s is not None
