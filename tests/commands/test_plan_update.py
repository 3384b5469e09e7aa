"""What a plan says of the update: text, JSON and page; by arithmetic, and by a compiler that is made up."""

import json
from dataclasses import replace

import pytest
from planned_updates import alone, config_of, made, seen_on_page

from pat_jax.commands.plan import question_of
from pat_jax.common.errors import UserError
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.page import plan_text
from pat_jax.profiling.capacity.report import PlanReport, Update
from pat_jax.profiling.cross_compile.compiled import CompiledProgram

GIB = 2**30
FIRST, LAST = Split(8, 1), Split(1, 8)
SHAPE = {"rows": 8, "length": 4096}


def update_of(report: PlanReport) -> Update:
    assert report.update is not None
    return report.update


def program(name: str, **fields: object) -> CompiledProgram:
    return CompiledProgram(name, FIRST, layers=2, compiled_layers=(2,), **fields)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return made("--beta 0.1 --mini_batch_size 4")


def test_every_part_of_an_iteration_is_told(report: PlanReport):
    update = update_of(report)
    assert update.scored == ("the policy before its first step", "the reference")
    assert update.batches.steps == 2 and update.split == FIRST and update.fsdp == 8
    for text in (plan_text(report), seen_on_page(report)):
        for words in ("forward and backward", "optimizer", "weights to the rollout"):
            assert words in text
        assert "Log-probabilities are those of the policy before its first step and" in text
        assert "2 optimizer steps." in text and "Model FLOP utilisation" in text
        assert "No update of this engine has been measured" in text
        assert "not verified" in text and "35.0 % of the peak (assumed)" in text
        assert "rollout's share" in text
    assert "an iteration, adapting; its update not verified" in seen_on_page(report)


def test_iterations_are_rollouts_and_the_update(report: PlanReport):
    update, iterations = update_of(report), report.iterations
    content = json.loads(report.to_json())
    assert content["version"] == 9
    assert len(content["iterations"]) == len(iterations)
    systems = report.comparison.systems
    for system, iteration in zip(systems, iterations, strict=True):
        assert iteration.rollout_s == system.mean_s and iteration.update_s == update.total_s
        assert iteration.total_s == pytest.approx(system.mean_s + update.total_s)
        assert iteration.rollout_share == pytest.approx(system.mean_s / iteration.total_s)
    stages = (update.scoring, update.gradients, update.apply, update.transfer)
    assert update.total_s == pytest.approx(sum(stage.total for stage in stages))
    assert all(stage.total > 0 for stage in stages)
    assert update.mfu == pytest.approx(update.flops / update.update_s / (8 * 9.89e14))
    assert str(update.target) == report.comparison.traces[0].layout[0]


def test_what_an_algorithm_scores():
    assert alone().scored == () and alone().scoring.total == 0
    once, twice = alone("--beta 0.1"), alone("--beta 0.1 --mini_batch_size 4")
    assert once.scored == ("the reference",) and len(twice.scored) == 2
    assert alone("--mini_batch_size 4").scored == ("the policy before its first step",)
    # In the compute dtype: two bytes of a number, four of a parameter that is trained.
    assert 2 * once.memory.reference == once.memory.parameters > 0 == alone().memory.reference
    assert twice.apply.total == pytest.approx(2 * once.apply.total)


def test_memory_is_the_sum_of_its_parts():
    memory = alone("--beta 0.1 --remat full").memory
    assert memory.is_least and memory.stage == "gradients of 8 x 4096 tokens"
    assert memory.optimizer == pytest.approx(2 * memory.parameters, abs=64)
    assert memory.gradients == memory.parameters
    # A micro-batch's own gradients, and at least the inputs of two layers: 4,096 tokens of 32 numbers.
    kept = memory.temporaries - memory.parameters
    assert 2 * 4096 * 32 * 2 <= kept < 16 * 4096 * 32 * 2
    assert memory.total == 3 * memory.parameters + memory.reference + memory.optimizer + kept
    assert memory.shortage == memory.tightness == ""


def test_the_experts_of_a_layer_lie_together_and_so_do_their_gradients():
    """Eight, of three matrices of 16 x 32, in two bytes: on each device all of them."""
    of_moe = {"model": "tiny-moe"}
    full, adapters = (alone(f"--remat full {x}", **of_moe).memory for x in ("", "--lora.rank 2"))
    inputs, experts = 3 * 4096 * 32 * 2, 8 * 3 * 16 * 32 * 2
    assert full.is_least and full.temporaries >= full.gradients + inputs + 2 * experts
    assert adapters.temporaries >= adapters.gradients + inputs + experts
    kept = full.temporaries - full.gradients - 2 * experts
    assert adapters.temporaries - adapters.gradients - experts == pytest.approx(kept, rel=0.5)


def test_what_was_compiled_counts_in_memory_and_times_are_arithmetic():
    grad = program("grad", **SHAPE, temp_bytes=20 * GIB, output_bytes=5, alias_bytes=4)
    compiled, by_hand = (alone(programs=(grad, program("apply", temp_bytes=GIB))), alone())
    assert not compiled.memory.is_least and compiled.memory.temporaries == 20 * GIB + 1
    assert replace(compiled, memory=by_hand.memory) == by_hand


def test_a_refused_program_is_left_to_arithmetic():
    refused = program("grad", **SHAPE, error="too large", temp_bytes=GIB)
    assert alone(programs=(refused,)) == alone()


@pytest.mark.parametrize(
    ("gib", "words"),
    [
        (21.0, ""),
        (19.0, "the update needs 20 GiB of a device for gradients of 8 x 4096 tokens"),
        (20.5, "the update takes 20 GiB of a device's 20.5 GiB: it may find no room"),
    ],
)
def test_an_update_without_room_says_so_and_what_helps(gib: float, words: str):
    size = 20 if gib < 21 else 18
    grad = program("grad", **SHAPE, temp_bytes=size * GIB)
    report = made(f"--device_memory_gib {gib} --remat dots --tokens_per_micro_batch 65536", (grad,))
    output = [line for line in report.warnings if "the update" in line]
    if not words:
        assert output == [] and "it fits." in plan_text(report)
        return
    assert len(output) == 1 and output[0].startswith(words)
    advice = (
        "take --remat full",
        "lower --algorithm.tokens_per_micro_batch (65536)",
        "use more devices",
    )
    assert all(words in output[0] for words in advice)
    assert f"Warning: {output[0]}" in plan_text(report) and output[0] in seen_on_page(report)
    assert ("does NOT fit" in plan_text(report)) == ("needs" in words)


def test_what_is_known_without_a_compiler_may_already_be_too_much(report: PlanReport):
    asked = f"--remat none --tokens_per_micro_batch {2**22}"
    held = alone(asked).memory.total / GIB
    tight = f"{asked} --device_memory_gib {held / 2!r}"
    memory = alone(tight).memory
    assert memory.shortage.startswith(f"the update needs at least {held:.3g} GiB of a device")
    told = plan_text(made(tight))
    assert "may fit" not in told and "does NOT fit" in told
    assert "it may fit" in plan_text(report)


NUMBERS = 3_776  # of tiny that a device of eight has


@pytest.mark.parametrize(
    ("options", "weight", "moments", "offloaded"),
    [
        ("", 4, 8, 0),
        ("--optimizer.moment_dtype bfloat16", 4, 4, 0),
        ("--optimizer.weight_dtype bfloat16", 2, 8, 0),
        ("--optimizer.offload true", 4, 0, 8),
        ("--optimizer.offload true --optimizer.moment_dtype bfloat16", 4, 0, 4),
    ],
)
def test_what_the_optimizer_keeps_by_hand(options: str, weight: int, moments: int, offloaded: int):
    """Bytes of a number; gradients add up in float32, and an H100 has 64 GB/s to its host, there and back."""
    update = alone(f"{options} --beta 0.1 --mini_batch_size 4")
    memory = update.memory
    assert memory.parameters == weight * NUMBERS and memory.reference == 2 * NUMBERS
    assert memory.optimizer == pytest.approx(moments * NUMBERS, abs=64)  # and its counters
    assert memory.gradients == 4 * NUMBERS and memory.offloaded == offloaded * NUMBERS
    assert update.apply.host == pytest.approx(2 * 2 * offloaded * NUMBERS / 64e9)
    assert update.gradients.host == update.scoring.host == update.transfer.host == 0


def test_moments_are_on_the_device_in_the_optimizer_s_step():
    """Which is the largest program where it has more than gradients have."""
    grad, apply = program("grad", **SHAPE, temp_bytes=GIB), program("apply", temp_bytes=2 * GIB)
    memory = alone("--optimizer.offload true", (grad, apply)).memory
    assert memory.stage == "the optimizer's step" and memory.temporaries == 2 * GIB
    assert memory.optimizer == pytest.approx(8 * NUMBERS, abs=64)
    memory = alone("--optimizer.offload true", (grad,)).memory
    assert memory.optimizer < 64 and memory.temporaries == GIB


def test_weights_go_where_the_rollout_begins_and_nowhere_else():
    """What the transfer to a layout without room would take is no part of the update."""
    large, small = (
        program("transfer", target=split, temp_bytes=size * GIB)
        for split, size in ((LAST, 50), (FIRST, 10))
    )
    memory = alone(programs=(large, small)).memory
    assert memory.stage == "the transfer to dp8tp1" and memory.temporaries == 10 * GIB
    assert memory.gradients == 0 and memory.shortage == ""


def test_nothing_is_said_of_an_update_where_nothing_is_trained():
    others = "--algorithm ppo --beta 0.1 --critic.model tiny --reward model:tiny math"
    assert question_of(config_of(f"--train false {others}"), "").build.order.others == {}
    report = made("--train false")
    assert report.update is None and report.iterations == []
    assert json.loads(report.to_json())["update"] is None
    for text in (plan_text(report), seen_on_page(report)):
        assert "update" not in text.lower()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mini_batch_size 3", "is 3: expected a divisor of --rollout.prompts_per_step (8)"),
        ("--responses 12", "option --responses is 12: expected a multiple of"),
        ("--prompts_per_step 16384 --responses auto", "is 16384: expected at most 8,192 with"),
        ("--beta -1", "option --algorithm.beta is -1"),
        ("--critic.model tiny", "with --algorithm.baseline group, which has no critic"),
        ("--critic.lora.rank 4", "with --algorithm.baseline group, which has no critic"),
        ("--reward model:", "option --reward is 'model:': expected a value"),
        ("--train false --teacher.model tiny", "expected nothing unless --train is true"),
        ("--train false --rank 4", "option --lora.rank is 4: expected 0 with --train false"),
        ("--teacher.model tiny", "expected nothing unless --train is true and"),
        ("--algorithm.name distill", "expected a model that teaches"),
        ("--teacher.top_k 8", "expected 0 without a teacher"),
        ("--lora.adapter mine", "expected --lora.rank beside it, as a plan does not read"),
        ("--layout dp2tp4", "option --layout"),
        ("--gamma 0.9", "option --gamma"),
        ("--steps 5", "option --steps"),
    ],
)
def test_options_that_cannot_be(options: str, words: str):
    with pytest.raises(UserError) as caught:
        config_of(options)
    assert words in str(caught.value)
