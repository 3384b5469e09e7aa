"""What fits devices that are not there, against weights and caches by plain arithmetic."""

import math
import re
from dataclasses import replace

import pytest
from orders import order_of

from pat_jax.commands import plan
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.costs import costs_of
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import inside_hosts
from pat_jax.profiling.capacity.question import Question
from pat_jax.profiling.capacity.update import PlannedUpdate
from pat_jax.profiling.cross_compile.by_arithmetic import (
    by_arithmetic,
    check_room,
    nearest,
)
from pat_jax.profiling.cross_compile.target_build import Order
from pat_jax.profiling.predict.targets import Target

GIB = 2**30
PARAMETERS = {"llama-3.1-8b": 8.030e9, "qwen3-14b": 14.77e9}
KV_BYTES = {"llama-3.1-8b": 128 * 1024, "qwen3-14b": 160 * 1024}  # of a token, bfloat16


def order(model: str = "llama-3.1-8b", target: str = "h100:8", layers: int = 0, **options) -> Order:
    machine, shape = Target.parse(target), preset(model)
    asked = {"model": model, "target": target, **options}
    words = [f"--{name}={value}" for name, value in asked.items()]
    config, _ = parse(words, PlanConfig, presets=None).settled(shape.max_position)
    shape = replace(shape, num_layers=layers or shape.num_layers)
    return order_of(machine, config, shape, (2, 4))


@pytest.mark.parametrize("model", PARAMETERS)
def test_memory_is_weights_and_cache_by_arithmetic(model: str):
    needs = by_arithmetic(order(model)).alone
    assert needs.resident == pytest.approx(3 * 4 * PARAMETERS[model] / 8, rel=0.01)
    for split, weights in needs.weights.items():
        assert weights == pytest.approx(2 * PARAMETERS[model] / split.tp, rel=0.01)
        # A response of full length, and the page of nobody.
        pages = math.ceil((25_600 / 16 + 1) / split.tp)
        assert needs.pool(split) == pages * 16 * KV_BYTES[model]


def test_heads_that_the_devices_do_not_divide_are_planned_with_padding():
    build = by_arithmetic(order("qwen2.5-7b"))
    assert [split.tp for split in build.layouts] == [1, 2, 4, 8]
    notes = costs_of(build, None, "one-shot").notes
    assert [note for note in notes if note.startswith("28 query heads are padded to 32")]
    # Parameters of the model, and of a query and an output matrix for each of four heads in 28 layers.
    wanted = 2 * (7.616e9 + 28 * 2 * 4 * 128 * 3584)
    assert build.alone.weights[Split(8, 1)] == pytest.approx(wanted, rel=1e-3)


# Of eight devices, whose weights, moments, and gradients of two micro-batches are 4 bytes each.
LEFT_OF_AN_A40 = 47.6e9 - 5 * 4 * PARAMETERS["llama-3.1-8b"] / 8


@pytest.mark.parametrize(
    ("target", "size"),
    [("h100:8", 2**31), ("a40:8", LEFT_OF_AN_A40 / 16), ("v5e:2x4", 2**28)],  # the last lacks room
)
def test_logits_take_a_part_of_the_memory_that_an_update_leaves(target: str, size: float):
    predictor = by_arithmetic(order(target=target)).whole.models["policy"].predictor
    assert predictor.logit_tokens == pytest.approx(size / (4 * 128_256), rel=0.01)


def test_adapters_are_trained_on_a_base_of_two_bytes():
    """Rank 16 on Llama-3.1-8B: each layer's products by hand. Only embeddings are split over replicas."""
    rank, embed, layers = 16, 4096, 32
    outside = 4096 + 1024 + 1024 + 4096 + 3 * 14_336  # queries, keys, values, output, MLP
    adapters = layers * rank * (7 * embed // 8 + outside)
    needs = by_arithmetic(order(rank=rank)).alone
    base = 2 * PARAMETERS["llama-3.1-8b"] / 8
    assert needs.resident == pytest.approx(base + 3 * 4 * adapters, rel=0.01)
    assert needs.resident < 0.3 * by_arithmetic(order()).alone.resident


def test_where_memory_is_scarce_a_pool_is_no_larger_than_layouts_need():
    """Than those need that share it; a layout without room has what it needs."""
    build = by_arithmetic(order(layers=6, device_memory_gib=7.0))
    needs, memory, (first, second, *_) = build.alone, build.memory, build.layouts
    assert needs.weights == memory.weights
    assert needs.held(first) > needs.usable > needs.held(second)
    pools = {split: max(needs.pool(second), needs.pool(split)) for split in build.layouts}
    assert pools == {split: memory.pool(split) for split in build.layouts}
    roomy = by_arithmetic(order(layers=6)).memory
    assert all(roomy.pool(split) > needs.pool(split) for split in memory.weights)


def test_a_model_too_large_says_by_how_much():
    build = by_arithmetic(order("llama-3.1-70b"))
    with pytest.raises(UserError) as caught:
        check_room(build, "llama-3.1-70b")
    message, needs = str(caught.value), build.alone
    assert "'llama-3.1-70b': no layout fits h100:8; dp1tp8, the smallest, needs" in message
    # 12 bytes of training and 2 / 8 of the policy for each of 70.6e9 parameters, a long response.
    expected = (12 + 2) * 70.6e9 / 8 + 25_600 * 320 * 1024 / 8
    assert needs.held(nearest(needs)) == pytest.approx(expected, rel=0.02)
    lacking = needs.held(nearest(needs)) - 0.9 * build.order.target.chip.memory_bytes
    assert f"{lacking / GIB:.3g} GiB more than the 71.2 that can be used" in message
    assert message.endswith(
        "can be used; take a larger --target, --train false, --weights int8 or a shorter --max_completion_length."
    )


ASKED = "--model qwen3-0.6b --responses 64 --max_completion_length 3072 --rollouts 1 "
ASKED += "--speculation.source none --compile false"
SENTENCE = re.compile(
    r"The update gathers weights across hosts\. With --fsdp_size 8 each host has all of them, and an "
    r"update takes ([\d.]+) % less: ([\d.]+) s instead of ([\d.]+) \(by arithmetic\)\. The KV cache "
    r"then has room for ([\d,]+) of the longest sequences, instead of ([\d,]+)\."
)


def asked(options: str) -> Question:
    words = f"{ASKED} {options}".split()
    return plan.question_of(parse(words, PlanConfig, prog="plan", presets=None), "")


def updating(question: Question) -> PlannedUpdate:
    return PlannedUpdate(question.build, (), question.options.memory_options)


def told(options: str) -> list[str]:
    question = asked(options)
    target = next(iter(question.build.layouts))
    workloads = [question.series.workload(question.lengths, 0)]
    return list(inside_hosts(updating(question), workloads, target))


def total_s(options: str) -> float:
    question = asked(options)
    workload = question.series.workload(question.lengths, 0)
    return updating(question).of([workload], next(iter(question.build.layouts))).total_s


def test_a_slow_network_is_named_with_what_the_option_gives():
    (sentence,) = told("--target a40:8x2")
    found = SENTENCE.fullmatch(sentence)
    assert found, sentence
    saved, then_s, now_s, less_room, room = (float(x.replace(",", "")) for x in found.groups())
    assert now_s == pytest.approx(total_s("--target a40:8x2"), rel=5e-3)
    assert then_s == pytest.approx(total_s("--target a40:8x2 --fsdp_size 8"), rel=5e-3)
    assert saved == pytest.approx(100 * (1 - then_s / now_s), abs=0.5)
    assert less_room < room


def test_nothing_is_said_where_it_cannot_help():
    assert told("--target a40:8") == []
    assert told("--target a40:8x2 --fsdp_size 8") == []
    # A host has no room for all parameters with their moments.
    assert told("--target a40:2x8 --model qwen3-8b") == []
    # Nor for its largest micro-batch.
    large = "--target h100:2x4@100 --model qwen3-8b --optimizer.offload true --responses 512"
    large += " --remat full"
    assert told(f"{large} --tokens_per_micro_batch 1048576") == []
    assert told(f"{large} --tokens_per_micro_batch 131072") != []
