"""The plan command: without a compiler, with one that is made up, and its mistakes."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import yaml
from pages import parsed, section_of, words_of

from pat_jax import plan
from pat_jax.commands import plan as body
from pat_jax.commands.expert_width import with_width
from pat_jax.commands.plan import question_of
from pat_jax.common.devices import Device
from pat_jax.config.command_line import parse
from pat_jax.engine.record.plot import draw_rollout
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.page import page, plan_text
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import planned
from pat_jax.profiling.capacity.report import PlanReport
from pat_jax.profiling.cross_compile.compile import Compilation
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.predict.kernel_model import RANGES
from pat_jax.profiling.predict.targets import PaperDevice, Target

GIB = 2**30
SMALL = ["--responses", "64", "--max_completion_length", "3072"]
SMALL += ["--rollouts", "1"]
ASKED = ["--model", "tiny", "--target", "h100:8", *SMALL]
NAMES = ("dp8tp1", "dp4tp2", "dp2tp4", "dp1tp8")


@pytest.fixture
def command(in_process, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(in_process, plan.main, *SMALL)


def compilation(*, refused: Split | None = None) -> Compilation:
    """What a compiler might say of a model of 32 layers."""
    splits = tuple(Split(8 // tp, tp) for tp in (1, 2, 4, 8))
    programs = []
    for split in splits:
        error = "too much scalar memory" if split == refused else None
        whole = {"layers": 32, "compiled_layers": (2, 4), "argument_bytes": GIB}
        programs.append(
            CompiledProgram(
                "decode",
                split,
                rows=8,
                length=5120,
                temp_bytes=GIB // 4,
                compile_s=1.5,
                error=error,
                **whole,
            )
        )
        programs.append(CompiledProgram("prefill", split, temp_bytes=GIB // 2, **whole))
    programs.append(CompiledProgram("grad", splits[0], temp_bytes=20 * GIB, **whole))
    return Compilation(tuple(programs), {"jaxlib": "0"})


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return made(compilation(), source="auto")


def made(compiled: Compilation | None, *options: str, source: str = "none") -> PlanReport:
    """Without the replays of drafts, which take the most time, unless a test looks at them."""
    asked = [*ASKED, "--speculation.source", source, *options]
    config = parse(asked, PlanConfig, prog="plan", presets=None)
    return planned(body.question_of(config, "the command"), compiled)


def seen_on_page(report: PlanReport) -> str:
    return words_of(parsed(page(report)))


def test_it_plans_without_a_compiler(command, tmp_path: Path):
    printed = command("--model", "tiny", "--target", "h100:8", "--compile", "false")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("plan-tiny-h100-8-")
    assert {"plan.json", "plan.html", "rollout.svg", "rollout.json", "config.yaml"} <= {
        path.name for path in folder.iterdir()
    }
    assert all(name in printed for name in NAMES)
    content = json.loads((folder / "plan.json").read_text())
    assert content["programs"] == [] and content["memory"]["source"] == "arithmetic"
    assert content["steps"]["source"] == "coefficients"


def test_every_figure_says_where_it_is_from(report: PlanReport):
    content = json.loads(report.to_json())
    assert {"compiler", "arithmetic", "coefficients"} <= content["sources"].keys()
    for text in (plan_text(report), seen_on_page(report)):
        assert "autotuning is off" in text and report.steps.explained in text
        assert report.lengths.source.partition(":")[0] in text
        assert "2 and 4 layers" in text


def test_every_picture_of_a_plan_says_that_it_is_computed(report: PlanReport):
    body = parsed(page(report))
    assert not re.search(r"\bnan\b|\binf\b", page(report).partition("</style>")[2])
    (note,) = [x.text for x in body.iter("p") if x.get("class") == "note"]
    assert all(trace.is_computed for trace in report.comparison.traces)
    assert (
        draw_rollout(report.comparison.traces[0]).plots[0].note == note == "computed, not measured"
    )


@pytest.mark.parametrize(
    ("written", "topology"),
    [
        ("v5e-8", (2, 4)),
        ("v5litepod-16", (4, 4)),
        ("v6e-1", (1, 1)),
        ("v5p-8", (1, 2, 2)),  # of which Google counts the cores, two of each chip
        ("v5p-128", (4, 4, 4)),
        ("v5e:8", (2, 4)),
    ],
)
def test_a_slice_is_named_by_its_sides_or_as_google_does(written: str, topology: tuple[int, ...]):
    target = Target.parse(written)
    assert target.topology == topology
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    ("target", "weights", "platform", "precision"),
    [
        pytest.param("a100:8", "auto", "cuda", "bfloat16", marks=pytest.mark.slow),
        ("h100:8", "fp8", "", ""),  # three steps were measured: too few for a range
        ("v5e:2x4", "int8", "tpu", "eight bits"),
        ("b200:8", "auto", "", ""),
        pytest.param("v5e:2x4", "auto", "", "", marks=pytest.mark.slow),
    ],
)
def test_every_predicted_second_says_between_what_measured_ones_lay(
    target: str, weights: str, platform: str, precision: str
):
    report = made(None, "--target", target, "--weights", weights)
    steps = json.loads(report.to_json())["steps"]
    margin, words = "not verified", "Too few steps of such a machine and such weights"
    if platform:
        measured = yaml.safe_load(RANGES.read_text())[platform][precision]
        low, high = measured[report.steps.source]
        assert steps["range"] == {
            "low": low,
            "high": high,
            "rows": measured["rows"],
            "own": measured["own"],
        }
        margin = f"× {low:.2f} to {high:.2f}"
        words = f"Measured steps took {margin} of what is predicted for them"
        counted = (
            f"{measured['rows']} steps, such chips, such weights; {measured['own']} of them of"
        )
        assert counted in report.steps.reliance
    assert json.loads(report.to_json())["sources"]["seconds"].startswith(words)
    text = plan_text(report)
    assert f"Predicted, {margin}, from" in text and f"nothing ran; steps {margin})" in text
    told = seen_on_page(report)
    assert f"adapting; steps {margin}" in told and told.count(words) == 2


def test_a_file_of_lengths_that_was_cut_below_the_cap_is_warned_of(tmp_path: Path):
    path = tmp_path / "cut.csv"
    path.write_text("\n".join(["length", *map(str, range(10, 600, 10)), *["600"] * 20]))
    asked = "--lengths", str(path), "--max-completion-length"
    report = made(None, *asked, "3072")
    (warning,) = report.warnings
    assert "25.3 % of the responses of cut.csv" in warning and "stop at 600 tokens" in warning
    assert "below the cap of 3,072" in warning and "--max_completion_length 600." in warning
    assert f"Warning: {warning}" in plan_text(report) and warning in seen_on_page(report)
    assert made(None, *asked, "600").warnings == ()
    path.write_text("\n".join(map(str, range(10, 600, 10))))
    assert made(None, *asked, "3072").warnings == ()


def test_memory_adds_up(report: PlanReport):
    for layout in report.memory.layouts:
        assert layout.programs == GIB // 2 and layout.is_used
        parts = layout.weights + layout.optimizer + layout.kv_cache + layout.programs
        assert layout.total == parts + layout.drafts <= report.memory.limit
        assert 0 < layout.drafts < layout.kv_cache


def test_a_layout_that_does_not_compile_is_not_used():
    report = made(compilation(refused=Split(1, 8)))
    refused = {str(x.split): x.refusal for x in report.memory.layouts if x.refusal}
    assert refused == {"dp1tp8": "decode does not compile: too much scalar memory"}
    assert [system.name for system in report.comparison.static] == list(NAMES[:3])
    for text in (plan_text(report), seen_on_page(report)):
        assert "refused: decode dp1tp8: too much scalar memory" in text
        assert "9 programs compiled in" in text and "1 refused." in text
    # A long reason stands below the table of memory: in a cell it would make the line a tower.
    body = parsed(page(report))
    lines = [x.text for x in body.iter("li")]
    assert "dp1tp8: decode does not compile: too much scalar memory" in lines
    assert "not used" in [x.text for x in body.iter("td")]


def test_words_of_others_are_no_markup():
    evil = replace(made(None), limits=("<script>alert(1)</script>",), command="<b>'")
    for words in ("<script>alert(1)</script>", "<b>'"):
        assert words in seen_on_page(evil) and words in plan_text(evil) + evil.command


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model llama-3.1-8b --target z100:8", "'z100' is no accelerator known here"),
        ("--model llama-3.1-8b --target v5e:6", "expected the 2 dimensions"),
        ("--target=", "option --target is ''"),
        ("--model llama-4 --target h100:8", "model 'llama-4' is not a built-in shape"),
        pytest.param(  # `test_by_arithmetic.py` has the sentence
            *("--model llama-3.1-70b --target h100:8 --compile false", "take a larger --target"),
            marks=pytest.mark.slow,
        ),
        ("--model llama-3.1-8b --target h100:8 --lengths bad.csv", "bad.csv, line 2"),
        ("--model llama-3.1-8b --target h100:8 --responses 13", "--responses is 13"),
        (
            "--model qwen3-8b --max_prompt_length 1024 --max_completion_length 40000",
            "is 1024 + 40000 = 41024: expected at most the 40960 tokens of the context of 'qwen3-8b' "
            "(max_position_embeddings in a checkpoint's config.json); take --rollout.max_completion_length 39936.",
        ),
        (
            "--model tiny --target h100:8 --max_prompt_length 4096",
            "lower both, --rollout.max_prompt",
        ),
        ("--model tiny --target h100:8 --compile false --profile x", "profile x"),
    ],
)
def test_every_mistake_is_one_sentence(command, refused, tmp_path, options: str, words: str):
    (tmp_path / "bad.csv").write_text("3\n-1\n")
    assert words in refused(lambda: command(*options.split()))


def test_drafts_are_replayed_beside_rollouts_without(command, report: PlanReport):
    drafting, found = report.comparison.drafting, report.comparison
    assert drafting is not None and drafting.tokens_per_step[0] > 1.2
    assert found.adaptive.tokens_per_step == (1.0,)
    assert drafting.mean_s < found.adaptive.mean_s
    told = plan_text(report)
    assert f"{drafting.tokens_per_step[0]:.3g} tokens in a decode step" in told
    assert "Drafts are right as often as built in: counted on 1,261 responses" in told
    assert "None was measured" in told and "% of a rollout without drafts" in told
    assert "adaptive, drafts" in section_of(page(report), "Time of a rollout")
    for text in (told, seen_on_page(report)):
        assert "tokens a step with drafts of 7 from own text, siblings" in text
    names = [each.name for each in report.iterations]
    assert names == ["adaptive", "adaptive, drafts", *NAMES] and "With drafts it takes" in told


def test_bursts_with_drafts_are_compiled_beside_those_without():
    split = Split(8, 1)
    whole = {"layers": 32, "compiled_layers": (2, 4), "temp_bytes": GIB}
    verifying = CompiledProgram("decode", split, rows=8, length=5120, num_draft_tokens=7, **whole)
    known = compilation()
    report = made(replace(known, programs=(*known.programs, verifying)), source="auto")
    first, second, *_ = report.memory.layouts
    assert first.programs == second.programs == GIB  # of the others it is not known
    broken = replace(verifying, error="too much scalar memory")
    report = made(replace(known, programs=(*known.programs, broken)), source="auto")
    assert "decode with drafts does not compile: too much" in report.memory.layouts[0].refusal


def test_none_are_made_where_none_are_wanted():
    report = made(None)
    assert report.comparison.drafting is None
    assert "draft" not in plan_text(report)


def test_the_share_of_the_tail_and_the_kind_of_sums_are_told():
    one, other = (made(None, "--train", "false", *more) for more in ((), ("--sums", "one-shot")))
    assert "GPUs of a host sum as nccl kernels do" in plan_text(one)
    assert "GPUs of a host sum as one-shot kernels do" in plan_text(other)
    (trace,) = one.comparison.traces
    left = [sum(end > step for end in trace.done_after) for step in range(trace.total_steps)]
    share = sum(n <= 64 for n in left) / trace.total_steps
    assert one.comparison.tail_share == pytest.approx(share, abs=0.001)
    content = json.loads(one.to_json())
    assert content["comparison"]["tail_share"] == one.comparison.tail_share
    for text in (plan_text(one), seen_on_page(one)):
        assert "at most 64 responses" in text


def eight(kind: str = "NVIDIA H100 80GB HBM3") -> Sequence[Device]:
    return [cast("Device", PaperDevice(i, 0, device_kind=kind)) for i in range(8)]


def test_a_run_divides_experts_as_its_plan_does():
    asked = "--model qwen3-30b-a3b --rollout.prompts_per_step 16 --algorithm.mini_batch_size 16"
    config = parse([*asked.split(), "--rollout.max_completion_length", "4096"])
    asked = "--model qwen3-30b-a3b --train false --responses 128 --max_completion_length 4096"
    question = question_of(parse(asked.split(), PlanConfig, presets=None), "")
    width = with_width(config, eight()).rollout.expert_width
    assert width == question.options.rollout.expert_width == 8
    assert any("--expert_width is 8" in note for note in question.costs.notes)
    assert with_width(config, eight("cpu")).rollout.expert_width is None
    pinned = replace(config, rollout=replace(config.rollout, expert_width=2))
    assert with_width(pinned, eight()).rollout.expert_width == 2
