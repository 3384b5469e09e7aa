"""What a plan says of placements: prices, memory, and the choice."""

import json
from dataclasses import replace

import numpy as np
import pytest
from paying_tails import make_tails_pay

from pat_jax.commands import plan
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.planning.memory import GIB
from pat_jax.planning.placement import Placement
from pat_jax.planning.stage_names import ROLLOUT
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.ended_parts import streams_of
from pat_jax.profiling.capacity.page import page, plan_text
from pat_jax.profiling.capacity.placed_size import PlacedSize, part_of, spread_s
from pat_jax.profiling.capacity.placing import Placing
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import planned
from pat_jax.profiling.capacity.report import PlanReport
from pat_jax.profiling.capacity.update_batches import Packed
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.placement.iteration import Iteration
from pat_jax.profiling.placement.schedule import scheduled
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.comparison import Replayed
from pat_jax.profiling.simulate.machine import Workload

ASKED = "--model tiny --target h100:4 --responses 64 --max_completion_length 3072 --rollouts 1 "
ASKED += "--data nowhere --speculation.source none --compile false --placement auto "
PPO = "--algorithm.name ppo --beta 0.05 --critic.model tiny --reward model:tiny "
STREAMED = "--algorithm.whiten_advantages false "


def placing(options: str) -> Placing:
    asked = [*ASKED.split(), *options.split()]
    return Placing(plan.question_of(parse(asked, PlanConfig, prog="plan", presets=None), ""))


def first(found: Placing, one: Candidate) -> Iteration:
    iterations = found.iterations(one)
    assert not isinstance(iterations, str)
    return iterations[0]


@pytest.fixture(scope="module")
def ppo() -> Placing:
    return placing(PPO + STREAMED)


@pytest.fixture(scope="module")
def report(ppo: Placing) -> PlanReport:
    return planned(ppo.question, None)


def test_flatten_takes_what_the_plan_says_of_an_iteration(report: PlanReport):
    assert report.placements
    assert report.placements.flatten.seconds == pytest.approx(
        report.iterations[0].total_s, rel=1e-3
    )


def test_the_table_has_named_placements_and_the_choice(report: PlanReport):
    text, found = plan_text(report), report.placements
    assert found
    for name in ("interleave", "separate, scores", "separate, gradients"):
        assert name in text
    assert found.reason in text and " chosen" in text
    assert f"{found.num_considered} placements were considered" in text
    assert "Placements" in page(report)
    content = json.loads(report.to_json())["placements"]
    assert content["candidates"][0]["name"] == "flatten"


def test_separate_rollouts_are_on_half_of_the_devices(ppo: Placing):
    streams = [
        Candidate(Placement.named("separate", 4), x) for x in ("none", "scores", "gradients")
    ]
    none, scores, gradients = (ppo.priced(one) for one in streams)
    assert none.schedule and none.schedule.spans[0].devices == (0, 1)
    assert (none.seconds or 0) > (scores.seconds or 0) > (gradients.seconds or 0)
    iteration, flat = first(ppo, streams[0]), first(ppo, ppo.candidates[0])
    assert flat.rollout_s < iteration.rollout_s
    for few, many in zip(iteration.stages[:-1], flat.stages[:-1], strict=True):
        assert few.total_s > many.total_s and few.name == many.name


def test_a_tail_is_priced_beside_flatten(report: PlanReport):
    assert report.placements
    (tail,) = [x for x in report.placements.candidates if x.candidate.tail]
    flat = report.placements.flatten
    assert tail.name == f"flatten, tail {tail.candidate.tail}" and tail.name in plan_text(report)
    assert tail.seconds and tail.worst_s and tail.seconds < tail.worst_s
    # Nothing of what both have is in the error: the rollout up to the tail, and the updates.
    assert tail.worst_s < 1.1 * tail.seconds
    assert report.placements.chosen is flat  # a tiny model reads in no time


def test_a_tail_is_chosen_where_it_pays_even_if_prices_are_wrong(monkeypatch: pytest.MonkeyPatch):
    make_tails_pay(monkeypatch)
    found = placing(PPO).placements()
    assert found.chosen.candidate.tail and found.chosen.candidate.placement.is_flat
    assert "even if all on halves of the devices takes 10.0 % longer" in found.reason
    ours, flat = found.chosen.schedule, found.flatten.schedule
    assert ours and flat and ours.stage_s.keys() == flat.stage_s.keys()


@pytest.mark.parametrize(
    "options",
    [
        "",  # nothing is read before an update
        f"{PPO} --lora_rank 4 --critic.lora.rank 4",
        f"{PPO} --target h100:6",
    ],
)
def test_what_cannot_have_a_tail_is_offered_none(options: str):
    found = placing(options).placements()
    assert not [x for x in found.candidates if x.candidate.tail]


def test_a_tail_has_half_of_each_host():
    found = placing(f"{PPO} --target h100:4x2")
    (tail,) = [x for x in found.placements().candidates if x.candidate.tail]
    assert tail.seconds and tail.worst_s and tail.worst_s > tail.seconds
    assert tail.schedule and tail.schedule.spans[0].devices == (0, 1, 2, 3)  # of each host


def test_copies_inside_a_host_are_read_in_a_tail_without_its_network():
    def reading_s(network: int, fsdp_size: int) -> float:
        found = placing(f"{PPO} --target h100:4x2@{network} --fsdp_size {fsdp_size}")
        (iteration,) = found.with_tail(32)
        return sum(iteration.beside.values())

    assert reading_s(100, 4) == reading_s(3200, 4) < reading_s(3200, 0) < reading_s(100, 0)


def test_whitening_and_several_steps_leave_gradients_behind_the_rollout():
    for options in (PPO, PPO + STREAMED + "--mini_batch_size 4 "):
        found = placing(options)
        assert all(one.overlap != "gradients" for one in found.candidates)
        named = next(one for one in found.candidates if one.overlap == "scores")
        iteration = first(found, named)
        begins = {span.name: span.begin_s for span in scheduled(iteration).spans}
        assert begins["gradients of the policy"] >= iteration.rollout_s


def test_a_part_without_room_is_refused_with_what_it_lacks(ppo: Placing):
    question, order = ppo.question, ppo.question.build.order
    one = Candidate(Placement.named("separate", 4))
    needed = ppo.priced(one).memory[1].num_bytes  # of an update
    rollout = replace(order.config.rollout, device_memory_gib=needed / 2 / GIB)
    tight = replace(order, config=replace(order.config, rollout=rollout))
    found = Placing(replace(question, build=replace(question.build, order=tight))).priced(one)
    lacking = f"{needed / 2 / GIB:.3g} GiB more of each of devices 2-3"
    assert found.seconds is None and lacking in found.refusal


def test_adapters_keep_their_roles_with_the_policy():
    found = placing("--lora_rank 4 --beta 0.05 --reward model:tiny")
    for one in found.candidates:
        assert one.placement.places["reference"] == one.placement.places["policy"]
    assert any(
        one.placement.places["reward"] != one.placement.places["policy"] for one in found.candidates
    )


def test_parts_of_targets():
    def part(text: str, count: int) -> str:
        return str(part_of(Target.parse(text), count))

    assert [part("h100:8x2", n) for n in (16, 8, 4)] == ["h100:8x2", "h100:8x1", "h100:4"]
    assert [part("v5e:4x4", n) for n in (8, 4)] == ["v5e:2x4", "v5e:2x2"]
    assert part("h100:6x3", 9) == "None"


@pytest.mark.parametrize(
    ("target", "count", "num_cuts", "expected"),
    [
        ("h100:8x2", 8, 2, "h100:4x2"),
        ("h100:8x2", 16, 2, "h100:8x2"),
        ("h100:8x4", 8, 4, "h100:2x4"),
        ("h100:8x2", 4, 4, "h100:2x2"),  # two processes a host
        ("h100:8", 4, 2, "h100:4x1"),
        ("h100:8x4@400", 16, 4, "h100:4x4@400"),
        ("h100:8x4@400", 16, 1, "h100:8x2@400"),
        ("h100:8x2@400", 8, 1, "h100:8x1"),  # no network
    ],
)
def test_parts_of_hosts_that_are_cut_alike(target: str, count: int, num_cuts: int, expected: str):
    assert str(part_of(Target.parse(target), count, num_cuts)) == expected


def test_a_plan_of_several_hosts_has_what_a_run_of_them_can_do():
    """Every host is cut alike: models learn over the network, and send weights inside a host."""
    alike = placing(f"{PPO}{STREAMED}--target h100:4x2 ")
    assert {i for one in alike.every for x in one.placement.places.values() for i in x} == {
        *range(4)
    }
    by_host = replace(alike, cuts=1)
    flat = [
        x.priced(Candidate(Placement.named("flatten", n))) for x, n in ((alike, 4), (by_host, 8))
    ]
    assert flat[0].seconds == pytest.approx(flat[1].seconds)
    halves = [
        {
            stage.name: stage.total_s
            for stage in first(x, Candidate(Placement.named("separate", n))).stages
        }
        for x, n in ((alike, 4), (by_host, 8))
    ]
    assert halves[0]["gradients of the policy"] > halves[1]["gradients of the policy"]


def test_a_plan_says_that_devices_are_numbered_within_a_host(report: PlanReport):
    assert report.placements and "cut alike" not in plan_text(report)
    several = replace(report, placements=replace(report.placements, num_cuts=2))
    assert "Each of the 2 hosts is cut alike" in plan_text(several)


def test_a_plan_of_four_hosts_prices_models_with_whole_hosts():
    found = placing(f"{PPO}--target h100:2x4 ").placements()
    (split,) = (one for one in found.candidates if one.name == "split")
    assert [part.devices for part in split.memory] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert split.schedule and split.seconds
    at_once = {x.name: x for x in split.schedule.spans if x.name.startswith("gradients")}
    policy, critic = at_once["gradients of the policy"], at_once["gradients of the critic"]
    assert policy.begin_s < critic.end_s and critic.begin_s < policy.end_s
    two, three = placing(f"{PPO}--target h100:4x2 "), placing(f"{PPO}--target h100:4x3 ")
    for hosts in two, replace(three, cuts=6):  # two processes on each of three hosts
        assert "split" not in [one.name for one in hosts.placements().candidates]


def test_each_host_receives_the_weights_once_from_hosts_that_have_the_policy():
    # 16 GB by a network of 400 Gb/s.
    assert spread_s(16 * 10**9, Target.parse("h100:8x4@400")) == pytest.approx(0.32)


def pack(some: Workload) -> Packed:
    return Packed.of(some, 4, [(1, 32), (1, 64), (1, 128)], 1)


# Of 25, 60, 30 and 30 tokens.
WORK = Workload(np.full(4, 10), np.array([15, 50, 20, 20]), 64, np.array([0, 0, 1, 1]))


def four_responses() -> Replayed:
    return Replayed(WORK, 9.0, np.array([1.0, 9.0, 2.0, 3.0]), False, Split(1, 1))


def test_responses_are_read_once_they_fill_micro_batches():
    found = streams_of(four_responses(), pack, pack, Seconds(), Seconds())
    # 25 of 32 tokens are no 80 %. 25 + 30 of 64 are, 30 of 32 too; the last has a row of 64.
    assert found.reads.ready_s == (2.0, 3.0, 9.0)
    # The whole batch has a row of 128 and one of 32.
    assert found.reads.slots == pytest.approx((64 / 160, 32 / 160, 64 / 160))
    assert found.reads.seconds(Seconds(products=2.0)) == pytest.approx((0.8, 0.4, 0.8))
    assert sum(found.reads.seconds(Seconds(attention=1.0))) == pytest.approx(1.0)
    assert found.reads.seconds(Seconds(links=2.0)) == pytest.approx([1.0] * 3)  # as each of two
    # The first response waits for its sibling.
    assert found.gradients.ready_s == (3.0, 9.0)
    unlike = replace(four_responses(), workload=replace(WORK, prompt_id=np.arange(4)))
    alone = streams_of(unlike, pack, pack, Seconds(), Seconds())
    assert alone.gradients.ready_s == (2.0, 3.0, 9.0)


def test_early_reads_have_each_prompt_as_often_as_responses():
    def shared(some: Workload) -> Packed:
        return Packed.of(some, 4, [(1, 32), (1, 64), (1, 128)], 1, shares_prompts=True)

    found = streams_of(four_responses(), pack, shared, Seconds(), Seconds())
    whole = shared(WORK).slots
    assert found.reads.slots == pytest.approx((64 / whole, 32 / whole, 64 / whole))
    assert found.gradients.slots == pytest.approx((64 / whole, 96 / whole))


def test_only_early_reads_of_a_run_share_no_prompts(ppo: Placing):
    build, options = ppo.question.build, ppo.question.options
    size = PlacedSize.of(build, options, build.order.target)
    work = Workload(np.full(16, 900), np.full(16, 50), 3072, np.zeros(16, int))
    assert sum(size.packed(work).shared) > 0 == sum(size.packed_early(work).shared)
    assert size.packed_early(work).slots > size.packed(work).slots


def test_what_ends_while_devices_are_busy_is_used_together():
    taken = Seconds(products=20.0)
    slow = streams_of(four_responses(), pack, pack, taken, Seconds())
    # Read for 8 s, until 10.0: both others have ended.
    assert slow.reads.ready_s == (2.0, 9.0)
    assert slow.reads.slots == pytest.approx((64 / 160, 96 / 160))
    assert slow.gradients.ready_s == pytest.approx((22.0,))  # what waits longer is read first
    learns = streams_of(four_responses(), pack, pack, Seconds(), taken)
    # Gradients of the second prompt keep the devices from 3.0 to 11.0.
    assert learns.reads.ready_s == (2.0, 3.0, 9.0) and learns.gradients.ready_s == (3.0, 11.0)


def test_nothing_is_placed_where_nothing_is_trained():
    with pytest.raises(UserError, match="--placement"):
        parse([*ASKED.split(), "--train", "false"], PlanConfig, prog="plan", presets=None)


def test_a_rollout_comes_first(ppo: Placing):
    iteration = first(ppo, ppo.candidates[0])
    found = scheduled(iteration)
    assert found.spans[0].name == ROLLOUT and not any(x.ready_s for x in iteration.stages)
