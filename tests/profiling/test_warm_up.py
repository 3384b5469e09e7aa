"""Which runs of a program its time is taken from, and how a profile is put right by runs that come later."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.warm_up.timings import NOISE, Timed, changes, rescaled
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.planning.latency.model import TABLES
from pat_jax.planning.types import Split

DP2, TP2 = Split(2, 1), Split(1, 2)


class Machine:
    """Programs whose runs take the seconds that are given, one after the other."""

    def __init__(self, *seconds: list[float]):
        self.seconds, self.ran = seconds, []

    def programs(self, *, steps: int = 1) -> list[Timed]:
        def once(i: int) -> float:
            self.ran.append(i)
            return self.seconds[i][self.ran.count(i) - 1]

        return [
            Timed("decode_table", (TP2, i), lambda i=i: once(i), per=steps)
            for i in range(len(self.seconds))
        ]


def warm_up(
    runs: int = 2, *, recheck: bool = False, known: tuple = (), first: object = None
) -> Warmup:
    layouts = {TP2: SimpleNamespace(platform="cpu")}
    specs: Any = SimpleNamespace(
        drafter=SimpleNamespace(come_from="suffix"), first=first, layouts=layouts
    )
    engine: Any = SimpleNamespace(specs=specs, programs=None, layouts=layouts)
    warmup = Warmup(engine, runs=runs, recheck=recheck)
    warmup.timings.known = {name: {} for name in TABLES} | {
        "decode_table": dict.fromkeys(known, 1.0)
    }
    return warmup


@pytest.mark.parametrize(
    ("runs", "seconds", "ran"),
    [
        (2, [0.9, 0.3, 0.2], 3),
        (1, [0.2, 0.3], 2),  # a first run, with all that is done once, is as good where it was fast
        (2, [3.0, 0.05, 0.04], 3),  # one that took long is not enough
        (5, [9.0, 5.0], 2),  # one behind it is, where it takes as long as that
        (5, [0.7, 0.6, 0.5], 3),
    ],
)
def test_the_fastest_of_a_few_runs_counts(runs, seconds, ran):
    machine, warmup = Machine(seconds), warm_up(runs)
    warmup.timings.note(*machine.programs(steps=4))
    assert warmup.timings.new["decode_table"] == {(TP2, 0): min(seconds) / 4}
    assert len(machine.ran) == ran


def test_where_few_are_measured_a_first_run_of_a_second_counts():
    machine, warmup = Machine([1.2, 0.1]), warm_up(first="a few")
    warmup.timings.note(*machine.programs())
    assert warmup.timings.new["decode_table"] == {(TP2, 0): 1.2} and len(machine.ran) == 1


@pytest.mark.parametrize(("recheck", "again"), [(False, {}), (True, {(TP2, 0): 0.4})])
@pytest.mark.parametrize("first_s", [0.5, 3.0])
def test_what_is_known_is_timed_where_it_is_to_be_checked(first_s, recheck, again):
    machine, warmup = Machine([first_s, 0.4]), warm_up(recheck=recheck, known=((TP2, 0),))
    warmup.timings.note(*machine.programs())
    assert warmup.timings.again["decode_table"] == again and not warmup.timings.new["decode_table"]
    assert len(machine.ran) == 1 + recheck


seconds = st.floats(1e-6, 1e3)


@given(
    known=st.dictionaries(st.tuples(st.sampled_from([DP2, TP2]), st.integers(1, 9)), seconds),
    factor=st.floats(0.01, 100.0),
)
def test_a_layout_that_takes_some_times_as_long_is_scaled_and_the_other_is_not(known, factor):
    again = {key: s * (factor if key[0] == TP2 else 1.0) for key, s in known.items()}
    told = rescaled(known, again)
    for key, before in known.items():
        has_changed = key[0] == TP2 and not 1 / NOISE <= factor <= NOISE
        assert told[key] == pytest.approx(before * (factor if has_changed else 1.0), rel=1e-6)


def test_one_odd_run_among_several_changes_nothing():
    known = {(DP2, rows): 0.1 * rows for rows in (1, 2, 4)}
    assert changes(known, {**known, (DP2, 2): 30.0}) == {}


def test_a_switch_is_its_pair_of_layouts_in_that_order():
    known = {(DP2, TP2, "all"): 1.0, (TP2, DP2, "all"): 1.0}
    assert changes(known, {(DP2, TP2, "all"): 9.0}) == {(DP2, TP2): 9.0}


def test_a_sample_stands_for_layouts_that_were_not_run_again():
    known = {(DP2, 1): 1.0, (DP2, 64): 2.0, (TP2, 1): 1.0}
    assert rescaled(known, {(DP2, 1): 3.0}, DP2) == {(DP2, 1): 3.0, (DP2, 64): 6.0, (TP2, 1): 3.0}
    both = {(DP2, 1): 3.0, (TP2, 1): 1.0}
    assert rescaled(known, both, DP2) == {(DP2, 1): 3.0, (DP2, 64): 6.0, (TP2, 1): 1.0}
