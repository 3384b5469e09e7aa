"""What `said_drafts_replay` works out itself: what a draft model catches up with, and its sums."""

import pytest

from benchmarks.said_drafts_replay import (
    ADAPTIVE,
    ALONE,
    BEST,
    COPIED,
    SYSTEMS,
    catching_up_s,
    name_of,
    summary,
)
from pat_jax.models.presets import preset
from pat_jax.planning.types import Ran, Split
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.sources import kernels_for
from pat_jax.profiling.predict.targets import Target

NARROW, WIDE = Split(8, 1), Split(1, 8)


def ran(split: Split, budget: int, steps: int = 100, held: float = 3000.0) -> Ran:
    return Ran(split, 8, 4096, 8 * split.dp, held, steps, 1.0, budget)


def test_a_draft_model_catches_up_once_behind_bursts_without_drafts_and_switches():
    draft_model = Composer(kernels_for(Target.parse("h100:8")), preset("qwen3-0.6b"))
    call_s = draft_model.prefill_call(ALONE, 4096)  # of 2048 tokens
    plain, drafting = ran(NARROW, 0), ran(NARROW, 3)
    known: tuple[tuple[list[Ran], int], ...] = (
        ([], 0),
        ([plain], 0),
        ([drafting], 2),
        ([drafting, drafting], 2),
    )
    # 800 tokens behind; 3200, of which there are 3000; another layout's cache is empty.
    known += ([drafting, plain, drafting], 3), ([drafting, *[plain] * 4, drafting], 4)
    known += (([drafting, ran(WIDE, 3, held=9000.0)], 2 + 5),)
    for bursts, calls in known:
        assert catching_up_s(bursts, draft_model) == pytest.approx(calls * call_s)


def test_speed_ups_are_those_of_each_replay():
    seconds = {name: [10.0, 10.0] for name in (*SYSTEMS, BEST)}
    seconds |= {BEST: [20.0, 12.0], ADAPTIVE: [16.0, 12.0], COPIED: [5.0, 6.0]}
    found, one = summary([seconds]), name_of("qwen3-0.6b", 0.7)
    assert found[f"speed_up_over_{BEST}"][one] == {"mean": 1.6, "worst": 1.2}
    assert found[f"speed_up_over_{ADAPTIVE}"][one] == {"mean": 1.4, "worst": 1.2}
    assert found[f"speed_up_over_{COPIED}"][one] == {"mean": 0.55, "worst": 0.5}


def test_a_system_counts_where_it_has_room():
    less = {BEST: [9.0], ADAPTIVE: [9.0], COPIED: [3.0]}
    more = less | {name_of("qwen3-0.6b", 0.7): [6.0]}
    found = summary([less, more])[f"speed_up_over_{BEST}"]
    assert found[name_of("qwen3-0.6b", 0.7)] == {"mean": 1.5, "worst": 1.5}
    assert found.keys() == {ADAPTIVE, COPIED, name_of("qwen3-0.6b", 0.7)}
