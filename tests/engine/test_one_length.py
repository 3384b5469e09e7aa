"""Programs that read only what rows hold have one length: as rows grow, no other is needed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from schedulers import DP2, SHAPES, at, end, make_scheduler
from two_devices import CONFIG, POLICY, TP2, engine, generate

from pat_jax.engine.by_need import ByNeed, decode_key
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.device.draft.drafters import drafter_for
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.sizing import pool_pages
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.layout import buckets as buckets_module
from pat_jax.layout.buckets import LEAST_ROOM, NO_DRAFTS, Buckets, Drafts, Shape
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.programs.programs import Key, ProgramTable
from tests.lossless import EOS_IDS, lively_params

pytestmark = pytest.mark.timeout(600)
HELD = replace(SHAPES, buckets=replace(SHAPES.buckets, reads="held"))
TEXTS = Drafts(num_draft_tokens=(3,), longest=3, most_tokens=64, texts=4)


def held_engine(drafts: Drafts = NO_DRAFTS) -> RolloutEngine:
    """An engine as on a GPU, with plain operations, which read a table of any width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_pages, "reads_what_rows_hold", lambda *_: True)
        made = RolloutEngine(
            POLICY,
            jax.devices()[:2],
            replace(CONFIG, min_rows=8),
            capacity=16,
            eos_ids=EOS_IDS,
            drafter=drafter_for(drafts),
            by_need=True,
        )
    made.runs_ahead = True
    made.compile()
    return made


@pytest.fixture(scope="module")
def one_length() -> RolloutEngine:
    return held_engine()


def lengths(engine: RolloutEngine, name: str) -> set[int]:
    return {key.length for key in engine.programs.keys(name)}


def test_rows_that_grow_need_no_other_program(one_length):
    """From 3 tokens to 55: past the bucket of 32."""
    rng = np.random.default_rng(4)
    prompts = [tuple(rng.integers(3, 61, 3 + i % 4).tolist()) for i in range(16)]
    asked = [
        Request(prompt, sequence_key(9, i), 4 + 3 * i, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    expected, buckets = generate(engine(min_rows=8), asked, FixedLayout(DP2))
    grown, report = generate(one_length, asked, FixedLayout(DP2))
    assert [x.tokens.tolist() for x in grown] == [x.tokens.tolist() for x in expected]
    assert report.compile_s == 0
    assert lengths(one_length, "decode") == lengths(one_length, "prefill") == {64}
    # Times are learned by what rows held.
    assert {burst.length for burst in buckets.bursts} == {32, 64}
    held = [burst.length for burst in report.bursts]
    assert held[0] < 16 and 32 < max(held) < 64


def test_a_warm_up_measures_several_contexts_by_one_program(one_length, monkeypatch):
    started = set()
    look_up = ProgramTable.__getitem__

    def watched(table: ProgramTable, key: Key) -> Callable[..., Any]:
        program = look_up(table, key)

        def run(*args: Any) -> Any:
            if key.name == "decode":
                started.add((key.split, key.rows, key.length, int(args[1].rows.position.max())))
            if key.name == "prefill":
                started.add((key.split, 0, key.length, int(args[3].max())))
            return program(*args)

        return run

    monkeypatch.setattr(ProgramTable, "__getitem__", watched)
    params, counted = lively_params(POLICY), []

    def weights(layout: Layout) -> Params:
        return jax.device_put(params, layout.param_shardings(POLICY))

    measured = Warmup(one_length, progress=lambda *x: counted.append(x)).measure(weights)
    rows = [(DP2, 8), (TP2, 8), (TP2, 16)]
    assert measured.decode_table.keys() == {(*at, n) for at in rows for n in (32, 64)}
    assert measured.prefill_table.keys() == {(x, n) for x in (DP2, TP2) for n in (32, 64)}
    # A burst of four steps ends at the context's end, and a page of eight tokens too.
    bursts = {(*at, 64, n - 4) for at in rows for n in (32, 64)}
    assert started == bursts | {(x, 0, 64, n - 8) for x in (DP2, TP2) for n in (32, 64)}
    assert [done for done, _ in counted] == [*range(1, len(counted) + 1)]
    assert {total for _, total in counted} == {len(counted)}


def test_a_warm_up_measures_drafts_by_the_programs_of_short_contexts_alone(monkeypatch):
    monkeypatch.setattr(buckets_module, "LEAST_ROOM", 4 * 32)
    drafted = held_engine(TEXTS)
    params, counted = lively_params(POLICY), []

    def weights(layout: Layout) -> Params:
        return jax.device_put(params, layout.param_shardings(POLICY))

    measured = Warmup(drafted, progress=lambda *x: counted.append(x)).measure(weights)
    rows = [(DP2, 8), (TP2, 8), (TP2, 16)]
    assert measured.decode_table.keys() == {(*at, n) for at in rows for n in (32, 64)}
    assert measured.verify_table.keys() == {(*at, 32, 3) for at in rows}
    left = drafted.programs.missing()  # for a rollout, if it needs them
    assert {(key.name, key.length, key.num_draft_tokens) for key in left} == {("decode", 64, 3)}
    assert counted[-1] == (len(counted), len(counted))


@pytest.mark.parametrize(("shapes", "length", "steps"), [(SHAPES, 32, 8), (HELD, 64, 16)])
def test_no_burst_ends_at_a_bucket(shapes, length, steps):
    scheduler = make_scheduler(16, shapes, prompt=25)
    scheduler.fit()
    burst = scheduler.burst(at(0))
    assert (burst.shape.length, burst.max_steps) == (length, steps)


def test_texts_to_search_have_a_shorter_length_while_they_need_less_room():
    def compiled(longest: int, drafts: Drafts = TEXTS) -> tuple[int, ...]:
        steps = [2**i for i in range(6, 20) if 2**i < longest]
        buckets = Buckets({}, (*steps, longest), "held")
        return replace(HELD, buckets=buckets, drafts=drafts).lengths(3)

    assert compiled(18_432) == (4096, 18_432) and TEXTS.text_room(4096, 18_432) == LEAST_ROOM
    assert compiled(2560) == (2560,)
    assert compiled(18_432, replace(TEXTS, exit_layer=2)) == (18_432,)
    assert compiled(18_432, replace(TEXTS, texts=0)) == (18_432,)


def test_rows_are_compacted_after_drafts_from_short_texts():
    """A smaller bucket of rows is found by the length of programs without drafts."""
    buckets = Buckets({DP2: (2, 4, 8)}, (32, LEAST_ROOM), "held")
    shapes = replace(HELD, buckets=buckets, pages={DP2: 2**15}, drafts=TEXTS)
    scheduler = make_scheduler(16, shapes)
    end(scheduler, 3)
    table = ProgramTable()
    for shape in (Shape(DP2, 4, LEAST_ROOM), Shape(DP2, 2, LEAST_ROOM), Shape(DP2, 4, 32, 3)):
        table.declare(decode_key(shape), lambda x: x, jax.ShapeDtypeStruct((), np.float32))
        table.compile(decode_key(shape))
    scheduler.bursts.by_need = ByNeed(table, buckets)
    scheduler.fit()
    burst = scheduler.burst(replace(at(0), num_draft_tokens=3))
    assert burst.shape == Shape(DP2, 4, 32, 3) and burst.threshold == 2
    assert scheduler.bursts.rows_below(DP2, burst.shape) == 2
