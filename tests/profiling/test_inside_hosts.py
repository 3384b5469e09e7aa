"""A plan of several hosts says what `--fsdp_size` would give, and nothing if it would not help."""

import re

import pytest

from pat_jax.commands import plan
from pat_jax.config.command_line import parse
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import inside_hosts
from pat_jax.profiling.capacity.question import Question
from pat_jax.profiling.capacity.update import PlannedUpdate

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
    assert told(f"{large} --tokens_per_micro_batch 1048576") == []
    assert told(f"{large} --tokens_per_micro_batch 131072") != []
