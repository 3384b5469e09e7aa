"""Placements priced by what a machine has measured: passes and steps by a run, rollouts by a profile."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from placed_runs import ended
from profiles import save_profile
from runs import QWEN3, write_checkpoint

from pat_jax import plan as plan_command
from pat_jax.commands import plan
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.models.presets import preset
from pat_jax.planning import stage_names
from pat_jax.planning.latency.profile import Subject, read_profile
from pat_jax.planning.placement import Placement
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.costs import of_fewer_devices
from pat_jax.profiling.capacity.page import page, plan_text
from pat_jax.profiling.capacity.placing import Placing
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import planned
from pat_jax.profiling.capacity.report import PlanReport
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.cross_compile.target_build import Order
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.predict.targets import Target

ASKED = "--model tiny --target h100:8 --responses 64 --max_completion_length 3072 --rollouts 1 "
ASKED += "--data nowhere --speculation.source none --compile false --placement auto "
ASKED += "--algorithm.name ppo --beta 0.05 --critic.model tiny --reward model:tiny "
FLATTEN, SEPARATE = (Candidate(Placement.named(name, 8)) for name in ("flatten", "separate"))
REFERENCE = stage_names.predictions(stage_names.LOGPROBS, "reference")


def placing(*options: str) -> Placing:
    asked = [*ASKED.split(), *options]
    return Placing(plan.question_of(parse(asked, PlanConfig, prog="plan", presets=None), ""))


def composed_stages(found: Placing) -> dict[str, float]:
    """Composed seconds of each stage with `flatten`."""
    iterations = found.iterations(FLATTEN)
    assert not isinstance(iterations, str)
    (iteration,) = iterations
    return {stage.name: stage.total_s for stage in iteration.stages}


@pytest.fixture(scope="module")
def composed() -> Placing:
    return placing()


@pytest.fixture(scope="module")
def tokens(composed: Placing) -> int:
    """Of the planned iteration."""
    update = planned(replace(composed.question, options=PlanConfig()), None).update
    assert update
    return int(update.batches.tokens)


def spans_of(seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    begin_s, spans = 0.0, []
    for name, each in seconds.items():
        end_s = begin_s + each
        spans.append({"name": name, "devices": [*range(8)], "begin_s": begin_s, "end_s": end_s})
        begin_s = end_s
    return spans


@pytest.fixture
def content(composed: Placing, tokens: int) -> dict[str, Any]:
    """Of an iteration.json of a run that took what was composed, with each update as a whole."""
    seconds = composed_stages(composed)
    for role in ("critic", "policy"):
        both = stage_names.parts(stage_names.update(role))
        seconds[stage_names.update(role)] = sum(seconds.pop(x) for x in both)
    model = composed.question.build.order.model
    subject = Subject("gpu", "NVIDIA H100 80GB HBM3", 8, asdict(model), "bfloat16", "0.10.2")
    return {
        "step": 4,
        "groups": [[*range(8)]],
        "spans": spans_of({stage_names.ROLLOUT: 5.0} | seconds),
        "predicted_s": {},
        "tokens": tokens,
        "subject": asdict(subject),
        "hosts": 1,
        "rest": "device",
    }


@pytest.fixture
def written(tmp_path: Path, content: dict[str, Any]) -> Callable[..., str]:
    """Writes the content with changes, and returns the file's name."""

    def write(**changes: Any) -> str:
        path = tmp_path / "iteration.json"
        path.write_text(json.dumps(content | changes))
        return str(path)

    return write


def stretched(content: Mapping[str, Any], name: str, factor: float) -> list[dict[str, Any]]:
    """Spans in which one stage takes `factor` times as long."""
    seconds = {x["name"]: x["end_s"] - x["begin_s"] for x in content["spans"]}
    return spans_of(seconds | {name: factor * seconds[name]})


def test_an_iteration_that_took_what_is_composed_changes_nothing(composed: Placing, written):
    found = placing("--measured", written())
    assert composed_stages(found) == pytest.approx(composed_stages(composed), rel=1e-9)
    for one in (FLATTEN, SEPARATE):
        assert found.priced(one).seconds == pytest.approx(composed.priced(one).seconds, rel=1e-9)


def test_an_iteration_of_hosts_with_another_network_is_taken(written):
    network = "--target", "h100:4x2@400"
    assert placing("--measured", written(hosts=2), *network).question.measured is not None
    with pytest.raises(UserError, match="hosts 1, not 2"):
        placing("--measured", written(), *network)


def test_a_pass_that_took_twice_as_long_is_priced_so(composed: Placing, content, written):
    found = placing("--measured", written(spans=stretched(content, REFERENCE, 2)))
    before, after = composed_stages(composed), composed_stages(found)
    assert after == pytest.approx(before | {REFERENCE: 2 * before[REFERENCE]}, rel=1e-9)
    prices = [x.priced(FLATTEN).seconds or 0 for x in (composed, found)]
    assert prices[1] - prices[0] == pytest.approx(before[REFERENCE], rel=1e-6)
    # Four devices, of which no time was measured, have the same factor.
    pairs = [x.iterations(SEPARATE) for x in (composed, found)]
    few = [{y.name: y.total_s for y in x[0].stages} for x in pairs if not isinstance(x, str)]
    assert few[1] == pytest.approx(few[0] | {REFERENCE: 2 * few[0][REFERENCE]}, rel=1e-9)


def test_tokens_divide_the_seconds_of_passes_and_not_those_of_steps(
    composed: Placing, tokens: int, written
):
    before = composed_stages(composed)
    after = composed_stages(placing("--measured", written(tokens=2 * tokens)))
    assert after[REFERENCE] == pytest.approx(before[REFERENCE] / 2)
    assert after[stage_names.TRANSFER] == pytest.approx(before[stage_names.TRANSFER])
    gradients, step = stage_names.parts(stage_names.update("policy"))
    whole = before[gradients] + before[step]
    factor = whole / (2 * before[gradients] + before[step])
    for name in (gradients, step):
        assert after[name] == pytest.approx(factor * before[name])


def test_a_transfer_that_took_three_times_as_long_is_priced_so(composed: Placing, content, written):
    name = stage_names.TRANSFER
    after = composed_stages(placing("--measured", written(spans=stretched(content, name, 3))))
    before = composed_stages(composed)
    assert after == pytest.approx(before | {name: 3 * before[name]})


def test_what_an_evaluation_read_before_the_rollout_does_not_count(
    composed: Placing, content, written
):
    read = stage_names.predictions(stage_names.SCORES, "reward model")
    later = [x | {"begin_s": x["begin_s"] + 9, "end_s": x["end_s"] + 9} for x in content["spans"]]
    found = placing("--measured", written(spans=[*spans_of({read: 9.0}), *later]))
    assert composed_stages(found)[read] == pytest.approx(composed_stages(composed)[read])


def test_a_profile_of_all_devices_has_the_times_of_fewer(tmp_path: Path):
    profile = save_profile(tmp_path / "profile.json")
    found = placing("--profile", str(profile))
    question = found.question
    order, target = question.build.order, Target.parse("h100:4")
    half = by_arithmetic(Order.of(target, question.options.run(target), order.model, order.depths))
    costs = of_fewer_devices(question.costs, profile, order, half)
    assert costs and costs.source == "profile"
    assert {split for split, *_ in costs.latency.decode_table} == {
        Split(4, 1),
        Split(2, 2),
        Split(1, 4),
    }
    for rows in (1, 4, 8):
        here = costs.latency.decode_step(Split(2, 2), rows, 1024)
        assert here == question.costs.latency.decode_step(Split(4, 2), rows, 1024)
    assert found.priced(SEPARATE).seconds and not found.priced(SEPARATE).refusal


def test_a_profile_of_one_layout_has_no_half(tmp_path: Path):
    steps = {(Split(1, 8), n, length): 0.1 for n in (1, 64) for length in (1024, 4096)}
    prefill = {(Split(1, 8), length): 0.1 for length in (1024, 4096)}
    tables: dict[str, Any] = {"decode_table": steps, "prefill_table": prefill}
    tables |= {"reshard_table": {}, "migrate_table": {}}
    profile = save_profile(tmp_path / "profile.json", **tables)
    found = placing("--profile", str(profile))
    assert found.priced(FLATTEN).seconds
    assert found.priced(SEPARATE).refusal == "the profile has no times of 4 devices"


def test_experts_compute_the_rows_of_all_replicas(tmp_path: Path):
    path = save_profile(tmp_path / "profile.json")
    profile = read_profile(path)
    model = asdict(preset("tiny-moe"))
    replace(profile, subject=replace(profile.subject, model=model)).save(path)
    found = placing("--model", "tiny-moe", "--profile", str(path))
    assert found.priced(FLATTEN).seconds
    assert found.priced(SEPARATE).refusal == "the profile has no times of 4 devices"


def test_replicas_that_would_cross_hosts_have_no_times(tmp_path: Path):
    """Two devices of each of two hosts: dp2tp4 has each replica on one host of four."""
    profile = save_profile(tmp_path / "profile.json")
    found = placing("--profile", str(profile), "--target", "h100:4x2")
    question = found.question
    order, target = question.build.order, Target.parse("h100:2x2")
    half = by_arithmetic(Order.of(target, question.options.run(target), order.model, order.depths))
    assert Split(1, 4) in half.layouts
    costs = of_fewer_devices(question.costs, profile, order, half)
    assert costs
    assert {split for split, *_ in costs.latency.decode_table} == {Split(4, 1), Split(2, 2)}
    assert found.priced(Candidate(Placement.named("separate", 4))).seconds


@pytest.fixture(scope="module")
def report_of() -> Callable[..., PlanReport]:
    return lambda *options: planned(placing(*options).question, None)


def test_measured_prices_are_told_with_their_sources(report_of, content, written, tmp_path: Path):
    profile = str(save_profile(tmp_path / "profile.json"))
    file = written(spans=stretched(content, REFERENCE, 2))
    report = report_of("--profile", profile, "--measured", file)
    found = report.placements
    assert found
    text, html = (" ".join(x.split()) for x in (plan_text(report), page(report)))
    for words in (
        "by the profile's times",
        "Prices may be wrong by 10.0 % against one another",
        f"multiplied by what {file} has measured on all devices",
        f"{REFERENCE} × 2",
    ):
        assert words in text and words.replace("'", "&#39;") in html.replace("'", "&#39;")
    assert "It lacks" not in text and "passes not verified" not in text
    sources = json.loads(report.to_json())["placements"]["sources"]
    assert sources["has_profile"] and sources["iteration"] == file
    assert sources["factors"]["by_stage"][REFERENCE] == pytest.approx(2)


def test_prices_are_composed_where_a_stage_was_not_measured(report_of, content, written):
    spans = [x for x in content["spans"] if x["name"] != REFERENCE]
    report = report_of("--measured", written(spans=spans))
    text = " ".join(plan_text(report).split())
    assert f"It lacks {REFERENCE}." in text and "by composed times" in text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tokens": 0}, "field tokens is 0, expected those of a run that trains"),
    ({"tokens": None}, "no iteration.json as this version writes it"),
    ({"spans": [1]}, "no iteration.json as this version writes it"),
    ({"spans": []}, "of an iteration with 0 rollouts, expected 1"),
    ({"spans": spans_of({"rollout": float("inf")})}, "rollout from 0.0 to inf s"),
    ({"spans": spans_of({"rollout": 1.0}) * 2}, "of an iteration with 2 rollouts, expected 1"),
    ({"hosts": float("inf")}, "no iteration.json as this version writes it"),
    ({"hosts": 2}, "of something else (hosts 2, not 1)"),
    ({"rest": "host"}, "expected a run with --roles.rest device"),
]


@pytest.mark.parametrize(("changes", "words"), BAD)
def test_a_file_that_is_no_such_iteration_is_refused(written, changes, words: str):
    with pytest.raises(
        UserError, match="--placement flatten and no tail, or leave it out"
    ) as caught:
        placing("--measured", written(**changes))
    assert words in str(caught.value) and "option --measured is" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_kind": "NVIDIA A100-SXM4-80GB"}, "NVIDIA A100-SXM4-80GB, not h100"),
        ({"device_kind": "cpu", "backend": "cpu"}, "device_kind cpu, not h100; backend cpu"),
        ({"num_devices": 4}, "devices 4, not 8"),
        ({"model": {}}, "architecture None, not"),
        ({"model": 3}, "no iteration.json as this version writes it"),
        ({"dtype": "float32"}, "dtype float32, not bfloat16"),
    ],
)
def test_an_iteration_of_another_machine_is_refused(content, written, changes, words: str):
    with pytest.raises(UserError) as caught:
        placing("--measured", written(subject=content["subject"] | changes))
    assert words in str(caught.value)


def test_an_iteration_of_another_placement_is_refused(content, written):
    spans = [
        x | {"devices": [4, 5, 6, 7]} if x["name"] == REFERENCE else x for x in content["spans"]
    ]
    with pytest.raises(UserError, match=f"{REFERENCE} on devices 4-7 of 0-7"):
        placing("--measured", written(spans=spans))


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (None, "", "cannot be read (No such file or directory)"),
        ("{", "", "truncated or no JSON"),
        ("[]", "", "no iteration.json as this version writes it"),
        (None, "--placement flatten", "expected nothing without --placement auto"),
    ],
)
def test_every_mistake_is_one_sentence(
    in_process, refused, tmp_path: Path, text: str | None, options: str, words: str
):
    file = tmp_path / "iteration.json"
    if text is not None:
        file.write_text(text)
    asked = [*ASKED.split(), *options.split(), "--measured", str(file)]
    asked += ["--run_dir", str(tmp_path / "run")]
    assert words in refused(lambda: in_process(plan_command.main, *asked))


@pytest.mark.slow  # a run; the tests above hold the rest
def test_the_stages_of_a_run_are_those_of_its_plan(tmp_path: Path, composed: Placing):
    """A file as a run writes it, as if its devices were those of the plan."""
    judge = write_checkpoint(
        tmp_path / "judge", replace(QWEN3, head="scalar", tie_embeddings=False)
    )
    ended(tmp_path / "flatten", judge, "--layout", "dp8tp1")
    path = tmp_path / "flatten" / "run-flatten" / "iteration.json"
    with pytest.raises(UserError, match="device_kind cpu, not h100"):
        placing("--measured", str(path))
    kept = json.loads(path.read_text())
    model = asdict(composed.question.build.order.model)
    known = {"backend": "gpu", "device_kind": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16"}
    path.write_text(json.dumps(kept | {"subject": kept["subject"] | known | {"model": model}}))
    found = placing("--measured", str(path)).placements().sources.factors
    stages = {*composed_stages(composed)} - {*found.lacking}
    assert {REFERENCE, "scores of the reward model", "gradients of the critic"} < stages
    assert {"values of the critic", "step of the policy", stage_names.TRANSFER} < stages
    assert {*found.by_stage} == stages and min(found.by_stage.values()) > 1
