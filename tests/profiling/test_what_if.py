"""A measured machine, changed in what was asked for and in nothing else; a user's profile has to be of what is
planned."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fakes import SPLITS, made_up_latency
from hypothesis import given
from hypothesis import strategies as st
from orders import order_of

from pat_jax.common.errors import UserError
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.draft.drafters import NO_DRAFTER
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.warm_up.timings import NOISE, Timed, changes, rescaled
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.planning.latency.model import TABLES
from pat_jax.planning.latency.profile import Profile, Subject
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.costs import profiled
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.what_if import WhatIf, machine_of, unmeasured
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.predict.shard_profile import ShardProfiler, layouts_of, shard_of
from pat_jax.profiling.predict.targets import Target

MODEL = preset("llama-3.1-8b")
DP8, *_ = SPLITS
LATENCY = made_up_latency(
    dict(zip(SPLITS, (0.5, 0.4, 0.3, 0.25), strict=True)),
    dict.fromkeys(SPLITS, 0.01),
    reshard=0.2,
    migrate_per_token=1e-3,
    max_rows=16,
    lengths=(64, 128),
)
PROFILE = Profile(
    Subject("gpu", "made up", 8, asdict(MODEL), "bfloat16", "0"),
    LATENCY,
)
AS_IT_IS = WhatIf(responses=16, cap=96, longest_prompt=32)


def test_the_machine_has_the_buckets_that_are_needed():
    machine = machine_of(PROFILE, replace(AS_IT_IS, host_us=20))
    assert machine.host_s_per_sequence == pytest.approx(2e-5)
    assert machine.buckets.lengths == (64, 128) and machine.splits == SPLITS
    assert machine.capacity == 16 and machine.memory is None and machine.runs_ahead
    assert unmeasured(PROFILE, machine) == ""
    assert machine.truth.decode_step(DP8, 2, 128) == LATENCY.decode_step(DP8, 2, 128)
    larger = machine_of(PROFILE, replace(AS_IT_IS, responses=64, cap=1000))
    told = unmeasured(PROFILE, larger)
    assert "contexts beyond 128 tokens (up to 1,088)" in told
    assert "dp1tp8 beyond 16 rows a replica (up to 64)" in told and "dp8tp1" not in told


TARGET, SMALL = Target.parse("h100:8"), preset("qwen3-0.6b")
ASKED, _ = PlanConfig().settled(SMALL.max_position)
BUILD = by_arithmetic(order_of(TARGET, ASKED, SMALL, (2, 4)))
SUBJECT = Subject("gpu", "NVIDIA H100", 8, asdict(SMALL), "bfloat16", "0.10.2")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_devices": 4}, "devices 4, not 8"),
        ({"backend": "cpu"}, "backend cpu, not gpu"),
        ({"dtype": "float32"}, "dtype float32, not bfloat16"),
        ({"weights": "int8"}, "weights int8, not auto"),
        ({"model": asdict(preset("qwen3-1.7b"))}, "embed_dim 2048, not 1024"),
        ({"model": asdict(replace(SMALL, vocab_size=9))}, "vocab_size 9, not 151936"),
        ({"model": asdict(replace(SMALL, head_dim=64))}, "head_dim 64, not 128"),
        ({"model": {}}, "architecture None, not qwen3"),
    ],
)
def test_a_profile_of_something_else_is_refused(tmp_path: Path, other, words: str):
    steps = dict.fromkeys(SPLITS, 0.1)
    latency = made_up_latency(steps, steps, reshard=1, migrate_per_token=1, max_rows=2)
    path = tmp_path / "profile.json"
    Profile(SUBJECT, latency).save(path)
    assert profiled(path, BUILD.order, BUILD.buckets, NO_DRAFTER).source == "profile"
    Profile(replace(SUBJECT, **other), latency).save(path)
    with pytest.raises(UserError, match="of something else") as caught:
        profiled(path, BUILD.order, BUILD.buckets, NO_DRAFTER)
    assert words in str(caught.value)


CONFIG = RolloutConfig(
    prompts_per_step=4,
    num_generations=2,
    max_prompt_length=16,
    max_completion_length=16,
    min_length=32,
    min_rows=4,
    prefill_blocks=2,
    check_every=2,
    burst_steps=4,
)
TINY = ModelConfig("qwen3", 64, 32, 64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b"])
def test_the_shards_of_a_group_make_up_the_model(name: str):
    model = replace(preset(name), num_layers=1)

    def matrices(config: ModelConfig) -> int:
        leaves = jax.tree.leaves(Policy.from_config(config).abstract(jnp.bfloat16))
        return sum(x.size for x in leaves if x.ndim > 1)

    for split, layout in layouts_of(Target.parse("h100:8"), model).items():
        if model.num_kv_heads % split.tp == 0:  # else some are there several times
            assert split.tp * matrices(shard_of(model, layout)) == matrices(model)


@pytest.fixture(scope="module")
def profiler() -> ShardProfiler:
    device = jax.devices()[0]
    return ShardProfiler(TINY, Target.parse("h100:2"), CONFIG, device, jnp.float32, 8, runs=1)


def test_every_program_that_the_target_would_time_has_a_time(profiler: ShardProfiler):
    ticks: list[tuple[int, int]] = []
    latency = profiler.measure(lambda done, total: ticks.append((done, total)))
    engine = RolloutEngine(
        Policy.from_config(TINY), jax.devices()[:2], CONFIG, capacity=8, eos_ids=(0,)
    )
    buckets = engine.specs.buckets
    assert latency.decode_table.keys() == {
        (split, rows, length)
        for split in engine.layouts
        for rows in buckets.rows[split]
        for length in buckets.lengths
    }
    assert latency.prefill_table.keys() == {
        (split, length) for split in engine.layouts for length in buckets.lengths
    }
    both = (Split(2, 1), Split(1, 2))
    assert latency.reshard_table.keys() == {both, both[::-1]}
    assert latency.shift_round(both[0]) > 0.0
    assert latency.round_tokens == 32 * CONFIG.page_size
    assert ticks[-1][0] == ticks[-1][1] and [done for done, _ in ticks] == sorted(
        {done for done, _ in ticks}
    )
    # The links come on top of what this machine takes.
    links = profiler.composer.decode_links_s(8, Split(1, 2))
    assert 0 < links < latency.decode_step(Split(1, 2), 8, 32)


def test_a_model_without_a_shard_that_fits_is_refused():
    config = RolloutConfig(max_prompt_length=96, max_completion_length=160, device_memory_gib=0.001)
    device, target = jax.devices()[0], Target.parse("h100:8")
    model = replace(preset("llama-3.1-8b"), num_layers=2)
    profiler = ShardProfiler(model, target, config, device, jnp.bfloat16, 8)
    with pytest.raises(
        UserError, match=r"^option --shards is 'h100:8': .* none has a shard that fits"
    ):
        profiler.engines  # noqa: B018


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
