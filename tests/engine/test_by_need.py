"""Programs compiled while rollouts need them: which, when, and that nothing else changes."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import counted_compilations
from controllers import DP2, SHAPES, at, end, make_controller
from two_devices import CONFIG, POLICY, TP2, engine, generate

from pat_jax.engine.by_need import ByNeed, Shape
from pat_jax.engine.controller import Controller
from pat_jax.engine.device.programs import Key, ProgramTable
from pat_jax.engine.device.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.responses import Request
from pat_jax.planning.planner.scripts import ScriptedPath, Step
from pat_jax.planning.types import Ran
from tests.lossless import EOS_IDS

NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def declared() -> ProgramTable:
    """A decode program for every bucket of `SHAPES`."""
    table = ProgramTable()
    for rows in SHAPES.buckets.rows[DP2]:
        for length in SHAPES.buckets.lengths:
            table.declare(Shape(DP2, rows, length).key, lambda x, n=rows * length: x + n, NUMBER)
    return table


def by_need(controller: Controller, *compiled: tuple[int, int]) -> ByNeed:
    """Of a controller, with these rows and lengths compiled."""
    table = declared()
    for rows, length in compiled:
        table.compile(Shape(DP2, rows, length).key)
    controller.by_need = ByNeed(table)
    return controller.by_need


def burst_of(kept: int, *compiled: tuple[int, int]) -> tuple[int, int]:
    """Rows and length of the next burst with so many live sequences in each group."""
    controller = make_controller(16)
    end(controller, kept)
    by_need(controller, *compiled)
    controller.fit()
    return controller.burst(at(0)).shape[1:3]


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
        controller = make_controller(16)
        by_need(controller, *compiled)
        controller.fit()
        return controller.burst(at(0)).threshold

    assert threshold((8, 32), (4, 32)) == 4
    assert threshold((8, 32), (2, 32)) == 2
    assert threshold((8, 32)) == 0


def test_a_bucket_that_is_missed_is_compiled_once_its_rent_has_come_to_its_price():
    controller = make_controller(16)
    end(controller, 3)
    needed = by_need(controller, (8, 32))
    needed.programs.compile_seconds[Key("decode", DP2, 8, 32)] = 2.0
    fitting = Shape(DP2, 4, 32)
    ran = Ran(DP2, 8, 32, live=6, held=40.0, steps=4, seconds=0.9)
    controller.charge(ran)
    controller.charge(ran)
    assert not needed.has(fitting) and needed.programs.missing()
    controller.charge(ran)
    while not needed.has(fitting):
        time.sleep(0.01)
    controller.fit()
    assert controller.burst(at(0)).shape[1:3] == (4, 32)


def test_compiling_beside_a_run_that_fails_is_heard_of():
    table = ProgramTable()

    def broken(x):
        raise ValueError("this one")

    table.declare(Shape(DP2, 4, 32).key, broken, NUMBER)
    needed = ByNeed(table)
    needed.charge(Shape(DP2, 4, 32), 1.0)
    with pytest.raises(ValueError, match="this one"):
        while not needed.has(Shape(DP2, 4, 32)):
            time.sleep(0.01)


def test_a_program_is_compiled_when_it_is_looked_up_and_the_wait_is_counted():
    table = declared()
    key = Shape(DP2, 4, 32).key
    assert table.waited_s == 0 and table[key](1.0) == 129.0
    waited_s = table.waited_s
    assert waited_s == pytest.approx(table.compile_seconds[key], rel=0.5)
    assert table[key](2.0) == 130.0 and table.waited_s == waited_s
    assert len(table.missing()) == 5


def asked() -> list[Request]:
    rng = np.random.default_rng(4)
    return [
        Request(tuple(rng.integers(3, 61, 3 + i).tolist()), sequence_key(9, i), 4 + 3 * i)
        for i in range(12)
    ]


def test_rollouts_say_the_same_and_compile_less():
    """With a switch, on two devices; the second of two equal rollouts compiles nothing."""
    everything = engine()
    few = RolloutEngine(
        POLICY,
        jax.devices()[:2],
        CONFIG,
        capacity=16,
        eos_ids=EOS_IDS,
        runs_ahead=True,
        by_need=True,
    )
    path = ScriptedPath(DP2, (Step(TP2, 6),))
    (expected, _), (said, report) = (generate(one, asked(), path) for one in (everything, few))
    assert [x.tokens.tolist() for x in said] == [x.tokens.tolist() for x in expected]
    assert [switch.target for switch in report.switches] == ["dp1tp2"]
    assert report.compile_s > 0
    made, all_there = (len(list(one.programs.keys("decode"))) for one in (few, everything))
    assert 2 <= made <= all_there / 2
    with counted_compilations() as events:
        again, report = generate(few, asked(), path)
    assert events == [] and report.compile_s == 0
    assert [x.tokens.tolist() for x in again] == [x.tokens.tolist() for x in expected]
