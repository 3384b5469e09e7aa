"""`plan` and `simulate` with the drafts of a model: what they cost, what is assumed, what is refused."""

import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from profiles import save_profile
from runs import write_checkpoint

from pat_jax import generate, simulate
from pat_jax.commands import generate as body
from pat_jax.commands import plan
from pat_jax.common.errors import UserError
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse
from pat_jax.engine.warm_up.timings import Timed
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.models.presets import preset
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.profiling.capacity.page import page, plan_text
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import planned
from pat_jax.profiling.capacity.report import PlanReport
from pat_jax.run.start import prepare, profiles

TINY = preset("tiny")
ASKED = ["--model", "tiny", "--target", "h100:8", "--responses", "32", "--rollouts", "1"]
ASKED += ["--max_completion_length", "1024", "--max_prompt_length", "64"]
ASKED += ["--prompt_tokens", "16", "--train", "false"]
SHORT = [*ASKED, "--lengths", "short"]


def report_of(source: str, *options: str, asked: list[str] = SHORT) -> PlanReport:
    argv = [*asked, "--speculation.source", source, *options]
    return planned(plan.question_of(parse(argv, PlanConfig, prog="plan", presets=None), "it"), None)


@pytest.mark.parametrize(
    ("source", "share"),
    [("early_exit:9", 0.7), pytest.param("model:qwen3-0.6b", 0.99, marks=pytest.mark.slow)],
)
def test_a_plan_says_what_they_give_and_what_is_assumed(source: str, share: float):
    asked = ["--model", "qwen3-8b", *SHORT[2:]]
    worse, better = (
        report_of(source, "--draft_acceptance", right, asked=asked) for right in ("0.5", "0.95")
    )
    output = []
    for report in (worse, better):
        assert report.comparison.drafting is not None
        output += report.comparison.drafting.tokens_per_step
    assert 1.0 <= output[0] < output[1] <= 4.0  # budgets of 1 and 3
    # A pass of Qwen3-0.6B takes more than half of a step in the layout with the most TP.
    drafting = better.comparison.drafting
    assert drafting and drafting.mean_s < share * better.comparison.adaptive.mean_s
    text = plan_text(better)
    assert "assumed: each token with a probability of 0.95" in text and source in text
    assert "for each of its tokens of drafts a pass of" in text and source in page(better)


def test_where_they_do_not_pay_none_are_made():
    guess = "assumed: each token with a probability of 0.6 where"
    assert guess in plan_text(report_of("early_exit:1"))
    report = report_of("early_exit:1", "--draft_acceptance", "0.02")
    drafting, adaptive = report.comparison.drafting, report.comparison.adaptive
    assert drafting is not None
    assert drafting.mean_s < 1.02 * adaptive.mean_s and drafting.tokens_per_step[0] < 1.02


def test_a_draft_model_and_its_cache_are_in_the_memory_of_each_device():
    """Whole in every layout, and with pages for so many tokens, or for every row that may draft."""
    layouts = report_of("model:tiny").memory.layouts
    weights = report_of("none").memory.layouts[0].weights  # whole: of the same shape
    for layout in layouts:
        rows = 32 // layout.split.dp
        tokens = 16 + min(2**16, rows * 2048)  # and a page for nothing
        cache = 2 * 2 * TINY.num_layers * tokens * TINY.num_kv_heads * TINY.head_dim
        assert layout.drafts - cache - weights == pytest.approx(0, abs=0.02 * cache + 2**20)
        assert layout.drafts > cache + weights


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("early_exit:2", (), "expected early_exit:LAYER with a layer from 1 to 1, because"),
        (
            "model:nowhere",
            (),
            "expected model: and the folder of a checkpoint, or a built-in shape",
        ),
        ("model:qwen3-0.6b", (), "a draft model with the policy's 128 tokens, but this one has"),
        ("early_exit:1", ("--draft_acceptance", "1"), "is 1.0: expected a number in (0, 1)"),
        ("model:tiny", ("--draft_acceptance", "0"), "is 0.0: expected a number in (0, 1)"),
        ("suffix", ("--draft_acceptance", "0.7"), "expected 0.6 where no model generates drafts"),
    ],
)
def test_every_mistake_is_one_sentence(source: str, options: tuple[str, ...], words: str):
    with pytest.raises(UserError) as caught:
        report_of(source, *options)
    message = str(caught.value)
    assert words in message and "\n" not in message


def test_models_that_may_draft_are_read_from_their_folder(tmp_path: Path):
    fits = write_checkpoint(tmp_path / "fits", replace(TINY, num_layers=1))
    assert f"from model:{fits}." in plan_text(report_of(f"model:{fits}"))
    short = write_checkpoint(tmp_path / "short", replace(TINY, max_position=512))
    with pytest.raises(
        UserError, match="a draft model with a context of 1088 tokens, the longest prompt"
    ):
        report_of(f"model:{short}")


class TestSimulate:
    @pytest.fixture(scope="class")
    @classmethod
    def profile(cls, tmp_path_factory) -> Path:
        """Of a machine whose steps verify drafts that the first layer says."""
        path = tmp_path_factory.mktemp("profile") / "made-up.json"
        return save_profile(path, {3: 1.2}, drafts_from="the first layer")

    @staticmethod
    def asked(profile: Path, *options: str) -> list[str]:
        given = ["--responses", "32", "--max_completion_length", "128", "--prompt_tokens", "16"]
        given += ["--lengths", "reasoning", "--length_scale", "0.01"]
        return ["--profile", str(profile), *given, *options]

    def test_they_are_replayed_where_their_steps_were_measured(self, profile, in_process, tmp_path):
        out = tmp_path / "out.json"
        options = ["--speculation.source", "early_exit:1", "--draft_acceptance", "0.8"]
        options += ["--device_memory_gib", "10", "--out", str(out)]
        printed = in_process(simulate.main, *self.asked(profile, *options))
        assert "assumed: each token with a probability of 0.8" in printed
        (answer,) = json.loads(out.read_text())["answers"]
        adaptive, row, *_ = answer["systems"]
        # 1 + p + p² + p³, where all rows draft throughout.
        assert row["tokens_per_step"][0] == pytest.approx(1 + 0.8 + 0.64 + 0.512, rel=0.05)
        assert row["mean_s"] < adaptive["mean_s"]

    @pytest.mark.parametrize("source", ["suffix", "model:tiny"])
    def test_steps_that_verify_drafts_from_elsewhere_are_not_taken_for_them(
        self, profile: Path, in_process, refused, source: str
    ):
        asked = self.asked(profile, "--speculation.source", source)
        message = refused(lambda: in_process(simulate.main, *asked))
        words = "has no steps that verify drafts of --speculation.num_draft_tokens (1 3 7) from"
        assert words in message
        assert f"pat_jax.profile --speculation.source {source}" in message

    def test_by_itself_it_drafts_nothing_then_and_says_why(self, profile: Path, in_process):
        printed = in_process(simulate.main, *self.asked(profile))
        assert "drafts are from the first layer, not from texts: none are made" in printed


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
def test_a_session_tells_the_logger_and_has_the_counts(model, drafts_pay, monkeypatch, caplog):
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
