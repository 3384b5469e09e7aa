"""What an update's programs take: bounds, and where a rule says what must come out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.chips import chips
from pat_jax.models.presets import preset
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.sources import kernels_for
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.predict.update_times import ATTENTION, UpdateTimes
from pat_jax.profiling.predict.update_work import Rows, UpdateWork, Work

LLAMA = preset("llama-3.1-8b")
TARGETS = ("h100:8", "a40:8", "v5e:2x4", "v6e:2x4")


def times_on(text: str) -> UpdateTimes:
    target = Target.parse(text)
    return UpdateTimes(Composer(kernels_for(target), LLAMA), target)


def test_every_chip_has_a_share_for_attention():
    assert ATTENTION.keys() == chips().keys()
    assert all(0 < share < 1 for share in ATTENTION.values())


@given(
    text=st.sampled_from(TARGETS),
    tokens=st.integers(1, 10**5),
    length=st.integers(1, 10**5),
    remat=st.sampled_from(["full", "attention", "dots", "none"]),
)
def test_nothing_is_faster_than_the_chip(text: str, tokens: int, length: int, remat: str):
    times, rows = times_on(text), Rows(tokens, tokens * length / 2)
    chip = times.composer.kernels.chip
    work = UpdateWork(LLAMA, 8, 8, remat).gradients(rows)
    spent = times.seconds(work, tokens)
    assert spent.products >= work.flops / chip.flops_s
    assert spent.attention >= work.attention_flops / chip.flops_s
    assert spent.attention >= work.attention_bytes / chip.memory_bytes_s
    assert spent.memory >= work.num_bytes / chip.memory_bytes_s
    assert spent.links >= 0
    more = UpdateWork(LLAMA, 8, 8, remat).gradients(Rows(tokens + 100, rows.pairs + 100))
    assert times.seconds(more, tokens + 100).total > spent.total


@pytest.mark.parametrize(("text", "rate"), [("h100:8", 64e9), ("v5e:2x4", 15e9), ("a40:8", 32e9)])
def test_what_comes_from_the_host_comes_at_the_rate_of_its_bus(text: str, rate: float):
    """Before the program and after it: nothing goes on meanwhile."""
    work = Work(num_bytes=1e9)
    spent = times_on(text).seconds(replace(work, host_bytes=3e9))
    assert spent.host == pytest.approx(3e9 / rate)
    assert replace(spent, host=0.0) == times_on(text).seconds(work)
