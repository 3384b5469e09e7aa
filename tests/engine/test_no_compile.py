"""Programs: after the warm-up none is compiled, or each when a rollout needs it, and nothing else changes."""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import counted_compilations
from fakes import SETTINGS, subject
from iterations import Iterations
from restless import Restless
from schedulers import DP2, SHAPES, at, end, make_scheduler
from two_devices import CONFIG, POLICY, TP2, engine, generate

from pat_jax.engine.by_need import ByNeed, decode_key
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.responses import Request
from pat_jax.layout.buckets import NO_DRAFTS, Buckets, Drafts, Shape
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import RECOMPUTE_ALL, BurstResult, DraftPrediction, Plan, Split
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.rl.batches.types import Prompt
from pat_jax.run.generation import EVAL, sampling_request
from tests.lossless import EOS_IDS

pytestmark = pytest.mark.timeout(1500)
LAYOUTS = DP8, DP4TP2, TP8 = Split(8, 1), Split(4, 2), Split(1, 8)  # those of "kv2"


def test_the_counter_counts():
    function, x = jax.jit(lambda x: x * 3 + 1), jnp.arange(5.0)
    for count in (1, 0):
        with counted_compilations() as events:
            function(x)
        assert len(events) == count


def held_out(prompt: Prompt, sample: int) -> Request:
    config = SETTINGS["kv2"].rollout
    return sampling_request(config, prompt, (5, EVAL, 0, prompt.id, sample), 0.7)


@pytest.fixture(scope="module")
def warm() -> Iterations:
    return Iterations(subject("kv2"))


def test_iterations_compile_nothing(warm):
    up = ScriptedPath(DP8, (Step(DP4TP2, 13), Step(TP8, 7)))
    down = ScriptedPath(TP8, (Step(DP4TP2, 12), Step(DP8, 6, 20)))
    there_and_back = ScriptedPath(
        DP4TP2, (Step(TP8, 14, RECOMPUTE_ALL), Step(DP8, 9, RECOMPUTE_ALL))
    )
    paths = []
    with counted_compilations() as events:
        paths.append(warm.iterate(0, FixedLayout(DP8)))
        paths.append(warm.iterate(1, up, temperature=1.0, top_k=5))
        paths.append(warm.iterate(2, down, temperature=1.3, top_k=0, top_p=0.9))
        paths.append(warm.iterate(3, there_and_back, temperature=1.0, top_k=3, top_p=0.8))
    assert events == []
    assert paths == [
        [],
        ["dp8tp1", "dp4tp2", "dp1tp8"],
        ["dp1tp8", "dp4tp2", "dp8tp1"],
        ["dp4tp2", "dp1tp8", "dp8tp1"],
    ]


@pytest.mark.slow  # an engine of its own
def test_iterations_that_train_adapters_compile_nothing():
    """And the policy arrives with what the adapters have learned, beside its weights in each layout."""
    adapted = Iterations(subject("kv2", lora_rank=4), has_adapters=True)
    before = jax.device_get(adapted.state.params)
    with counted_compilations() as events:
        for step in range(2):
            adapted.iterate(step, ScriptedPath(DP8, (Step(DP4TP2, 12), Step(TP8, 4))))
    assert events == []
    after = jax.device_get(adapted.state.params)
    assert all((after[name].b != before[name].b).any() for name in before)


def test_moves_between_groups_compile_nothing(warm):
    with counted_compilations() as events:
        for step, split in enumerate((DP8, DP4TP2)):
            planner = Restless(split)
            warm.iterate(10 + step, planner, temperature=1.0)
            assert len(planner.moved) > 2
    assert events == []


def test_planning_by_the_measured_costs_compiles_nothing(warm):
    with counted_compilations() as events:
        planner = CostModelPlanner(LAYOUTS, warm.latency, warm.generator.lengths)
        warm.iterate(4, planner, temperature=1.0)
        prompts = [Prompt(i, (3, 4, 5)[: 1 + i % 3], "", {}) for i in range(20)]
        asked = [held_out(prompt, sample) for prompt in prompts for sample in range(3)]
        assert len(list(warm.generator.evaluate(asked))) == 60
    assert events == []


def test_lengths_are_learned_by_prompt_from_training_rollouts_only(warm, monkeypatch):
    asked = []
    stream = warm.engine.stream

    def spy(requests, *args, **options):
        asked.append({request.prompt_id for request in requests})
        return stream(requests, *args, **options)

    monkeypatch.setattr(warm.engine, "stream", spy)
    warm.iterate(5, FixedLayout(DP8), temperature=1.0)
    learned = warm.generator.lengths
    assert learned.prompts.prompt.tolist() == [0, 1, 2, 3] and (learned.prompts.mean > 0).all()
    assert list(warm.generator.evaluate([held_out(Prompt(2, (3, 4), "", {}), 0)]))
    assert warm.generator.lengths is learned
    # Prompt 2 of the held-out ones is another; in between the transfer was checked.
    assert asked == [{0, 1, 2, 3}, {None}, {None}]


NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def declared() -> ProgramTable:
    """A decode program for every bucket of `SHAPES`."""
    table = ProgramTable()
    for rows in SHAPES.buckets.rows[DP2]:
        for length in SHAPES.buckets.lengths:
            table.declare(
                decode_key(Shape(DP2, rows, length)), lambda x, n=rows * length: x + n, NUMBER
            )
    return table


def by_need(scheduler: Scheduler, *compiled: tuple[int, int]) -> ByNeed:
    """Of a scheduler, with these rows and lengths compiled."""
    table = declared()
    for rows, length in compiled:
        table.compile(decode_key(Shape(DP2, rows, length)))
    needed = scheduler.bursts.by_need = ByNeed(table, SHAPES.buckets)
    return needed


def wait_for(needed: ByNeed, shape: Shape) -> None:
    """Compiling beside a run takes a moment."""
    until = time.monotonic() + 60
    while not needed.has(shape):
        assert time.monotonic() < until, f"{shape} is not being compiled"
        time.sleep(0.01)


def burst_of(kept: int, *compiled: tuple[int, int]) -> tuple[int, int]:
    """Rows and length of the next burst with so many running sequences in each replica."""
    scheduler = make_scheduler(16)
    end(scheduler, kept)
    by_need(scheduler, *compiled)
    scheduler.fit()
    return scheduler.burst(at(0)).shape[1:3]


@pytest.mark.parametrize(
    ("kept", "compiled", "chosen"),
    [
        (3, [(4, 32), (8, 32)], (4, 32)),  # what fits is compiled
        (3, [(8, 32), (8, 64)], (8, 32)),  # the smallest that holds it
        (3, [(2, 32), (4, 64)], (4, 64)),  # one of longer contexts
        (3, [(2, 32), (2, 64)], (4, 32)),  # none holds it: what fits will be compiled
        (3, [], (4, 32)),
        (1, [(8, 64)], (2, 32)),  # eight times what fits is too large
    ],
)
def test_a_burst_takes_the_smallest_compiled_bucket(kept, compiled, chosen):
    assert burst_of(kept, *compiled) == chosen


def test_a_burst_ends_only_for_a_smaller_bucket_that_is_compiled():
    def threshold(*compiled: tuple[int, int]) -> int:
        scheduler = make_scheduler(16)
        by_need(scheduler, *compiled)
        scheduler.fit()
        return scheduler.burst(at(0)).threshold

    assert threshold((8, 32), (4, 32)) == 4
    assert threshold((8, 32), (2, 32)) == 2
    assert threshold((8, 32)) == 0


def test_a_bucket_that_is_missed_is_compiled_once_its_rent_has_come_to_its_price():
    scheduler = make_scheduler(16)
    end(scheduler, 3)
    needed = by_need(scheduler, (8, 32))
    needed.programs.compile_seconds[Key("decode", DP2, 8, 32)] = 2.0
    fitting = Shape(DP2, 4, 32)
    # Half of the rows are empty, and so half of the time is lost.
    ran = BurstResult(DP2, 8, 32, running=6, held=40.0, steps=4, seconds=1.8)
    scheduler.bursts.charge(DP2, ran)
    scheduler.bursts.charge(DP2, ran)
    assert not needed.has(fitting) and needed.programs.missing()
    scheduler.bursts.charge(DP2, ran)
    wait_for(needed, fitting)
    scheduler.fit()
    assert scheduler.burst(at(0)).shape[1:3] == (4, 32)


def test_a_bucket_that_fits_is_charged_nothing():
    scheduler = make_scheduler(16)
    needed = by_need(scheduler, (8, 32))
    needed.programs.compile_seconds[Key("decode", DP2, 8, 32)] = 1e-9
    scheduler.bursts.charge(
        DP2, BurstResult(DP2, 8, 32, running=16, held=40.0, steps=4, seconds=100.0)
    )
    assert len(needed.programs.missing()) == 5


def test_drafts_without_a_program_are_left_out_until_what_they_would_save_has_paid_for_it():
    drafts = Drafts(num_draft_tokens=(3,), longest=3, most_tokens=32, texts=1)
    scheduler = make_scheduler(16, replace(SHAPES, drafts=drafts))
    needed = by_need(scheduler, (8, 32))
    needed.programs.compile_seconds[Key("decode", DP2, 8, 32)] = 0.5
    drafting = Shape(DP2, 8, 32, 3)
    needed.programs.declare(decode_key(drafting), lambda x: x, NUMBER)
    # Each step saves 0.05 s: two tokens at the price of one and a half.
    predicted = DraftPrediction(tokens=2.0, step_s=0.15, plain_s=0.1)
    plan = Plan(DP2, 0, num_draft_tokens=3, predicted=predicted)
    scheduler.fit()
    burst = scheduler.burst(plan)
    assert burst.shape.num_draft_tokens == 0 and burst.max_steps == 16
    ran = BurstResult(DP2, 8, 32, running=16, held=40.0, steps=16, seconds=1.6)
    # Less than a second is saved by 12 steps with drafts, for which the bucket has room.
    scheduler.bursts.charge(DP2, ran)
    assert not needed.has(drafting)
    scheduler.bursts.charge(DP2, ran)
    wait_for(needed, drafting)
    assert scheduler.burst(plan).shape == drafting


def test_the_first_buckets_span_the_others():
    rows = {DP2: (2, 4, 8, 16), TP2: (4, 8, 16, 32)}
    buckets = Buckets(rows, (32, 64, 128))
    assert buckets.first(40, NO_DRAFTS) == Buckets({DP2: (2, 16), TP2: (4, 32)}, (64,))
    assert buckets.first(200, NO_DRAFTS).lengths == (128,)
    drafts = Drafts(num_draft_tokens=(1, 3, 7), longest=7, most_tokens=64)
    # 7 for up to 8 rows, 3 for up to 16, 1 for up to 32.
    assert buckets.first(40, drafts).rows == {DP2: (2, 8, 16), TP2: (4, 8, 16, 32)}


def test_compiling_beside_a_run_that_fails_is_heard_of():
    table = ProgramTable()

    def broken(x):
        raise ValueError("this one")

    table.declare(decode_key(Shape(DP2, 4, 32)), broken, NUMBER)
    needed = ByNeed(table, SHAPES.buckets)
    needed.charge(Shape(DP2, 4, 32), 1.0)
    with pytest.raises(ValueError, match="this one"):
        wait_for(needed, Shape(DP2, 4, 32))


def asked() -> list[Request]:
    rng = np.random.default_rng(4)
    return [
        Request(tuple(rng.integers(3, 61, 3 + i).tolist()), sequence_key(9, i), 4 + 3 * i)
        for i in range(12)
    ]


def test_rollouts_say_the_same_and_compile_less():
    """With a switch, on two devices; the second of two equal rollouts compiles nothing."""
    few = RolloutEngine(
        POLICY, jax.devices()[:2], CONFIG, capacity=16, eos_ids=EOS_IDS, by_need=True
    )
    few.runs_ahead = True
    path = ScriptedPath(DP2, (Step(TP2, 6),))
    expected, _ = generate(engine(), asked(), path)
    began = time.perf_counter()
    generated, report = generate(few, asked(), path)
    # What a rollout waits for a compiler is in no burst and no switch.
    assert report.total_s + report.compile_s <= time.perf_counter() - began
    assert [x.tokens.tolist() for x in generated] == [x.tokens.tolist() for x in expected]
    assert [switch.target for switch in report.switches] == ["dp1tp2"]
    assert report.compile_s > 0
    made, left = (
        sum(key.name == "decode" for key in keys) for keys in (few.programs, few.programs.missing())
    )
    assert 2 <= made <= left
    with counted_compilations() as events:
        again, report = generate(few, asked(), path)
    assert events == [] and report.compile_s == 0
    assert [x.tokens.tolist() for x in again] == [x.tokens.tolist() for x in expected]
