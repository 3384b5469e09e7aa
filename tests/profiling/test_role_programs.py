"""The programs that a plan compiles of further roles, and the memory that it predicts of each."""

import json
from collections.abc import Mapping
from dataclasses import replace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import order_of

from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.critic import CriticAdapterConfig, CriticConfig
from pat_jax.config.lora import LoraConfig
from pat_jax.config.run import AlgorithmConfig, RolloutConfig, RunConfig
from pat_jax.layout.layout import shard_bytes
from pat_jax.models.config import ModelConfig
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.resting import with_rest
from pat_jax.profiling.capacity.role_passes import RolePasses
from pat_jax.profiling.cross_compile.compiled import CompiledProgram, at_depth, together
from pat_jax.profiling.cross_compile.jobs import CompileJob, jobs_of
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.predict.targets import Target
from pat_jax.training.trainer import Trainer

POLICY = ModelConfig("qwen3", 1024, 256, 512, 2, 4, 4, head_dim=64, qk_norm=True)
SCALAR = replace(POLICY, head="scalar", num_layers=3)
LENGTH = 256
CONFIG = RunConfig(
    rollout=RolloutConfig(
        prompts_per_step=8,
        num_generations=2,
        max_prompt_length=LENGTH // 2,
        max_completion_length=LENGTH // 2,
        min_length=LENGTH,
        check_every=4,
        burst_steps=8,
    ),
    algorithm=AlgorithmConfig(
        name="ppo",
        **ALGORITHMS["ppo"],
        beta=0.05,
        mini_batch_size=8,
        tokens_per_micro_batch=8 * LENGTH,
    ),
    compute_dtype="bfloat16",
    remat="full",
)
OTHERS = {"critic": SCALAR, "reward model": replace(SCALAR, num_layers=2)}


ADAPTED = CriticAdapterConfig(rank=8)
# The critic trains all of itself, adapters over a base of its own, or over the policy's.
CRITICS = {
    "whole": (CriticConfig(model="judge"), LoraConfig()),
    "adapters": (CriticConfig(model="judge", lora=ADAPTED), LoraConfig()),
    "one base": (CriticConfig(lora=ADAPTED), LoraConfig(rank=4)),
}


def order(depths=(2,), critic: str = "whole") -> Order:
    of_critic, lora = CRITICS[critic]
    config, others = replace(CONFIG, critic=of_critic, lora=lora), OTHERS
    if not of_critic.model:
        others = OTHERS | {"critic": replace(POLICY, head="scalar")}
    return order_of(Target.parse("h100:8"), config, POLICY, depths, None, others)


def build(critic: str) -> TargetBuild:
    """What would run on eight H100, over the CPU devices of the tests."""
    return TargetBuild(with_rest(order((2,), critic), "host"), jax.devices("cpu")[:8])


def of_training(found: TargetBuild) -> list[CompileJob]:
    return [job for job in jobs_of(found) if job.record.name in ("predict", "grad", "apply")]


def test_each_role_has_programs_of_its_own_and_its_passes_are_whole():
    others = {name: replace(x, num_layers=7) for name, x in OTHERS.items()}
    unrolled = replace(CONFIG, scan_layers="false")  # a loop is not for the CPU that stands in here
    asked = Target.parse("h100:8"), unrolled, replace(POLICY, num_layers=9)
    deep = order_of(*asked, (2, 4), None, others)
    jobs = [job.record for job in of_training(TargetBuild(deep, jax.devices("cpu")[:8]))]
    found = [(x.role, x.name, x.layers) for x in jobs if x.role]
    passes = [("critic", "grad", 7), ("critic", "predict", 7), ("reward model", "predict", 7)]
    assert sorted(found) == sorted([*passes, ("critic", "apply", 2), ("critic", "apply", 4)])
    of_policy = [(x.name, x.layers) for x in jobs if not x.role]
    assert sorted(of_policy) == [("apply", 2), ("apply", 4), ("grad", 9), ("predict", 9)]
    assert len({x.identity for x in jobs}) == 3 + 3 + 1
    pair = [CompiledProgram("apply", jobs[0].split, role="critic", layers=n) for n in (2, 4)]
    assert at_depth(pair, deep.num_layers("critic")).layers == 7
    assert str(pair[0]) == f"apply of the critic {jobs[0].split}"
    assert CompiledProgram.from_json(json.loads(json.dumps(pair[0].to_json()))) == pair[0]


@pytest.mark.parametrize(("size", "groups"), [(4, 2), (0, 1)])
def test_a_step_has_the_sum_over_groups(size: int, groups: int):
    """In bfloat16, of what a device has."""
    one = replace(order(), target=Target.parse("h100:4x2"))
    one = replace(one, run=replace(one.run, fsdp_size=size))
    found = TargetBuild(one, jax.devices("cpu")[:8])
    trainer = found.whole.policy
    passes = RolePasses(found, found.whole.models["policy"].role, trainer.trained)
    num_bytes = shard_bytes(trainer.trained.abstract_gradients) / 2
    expected = passes.times.links.all_reduce_s(groups, num_bytes, hosts=groups)
    assert passes.apply(trainer).links == expected
    assert (expected > 0) == (groups > 1)


def predicted(found: TargetBuild) -> dict[tuple[str, str], int]:
    """Bytes of a device that a role holds while a program of its runs, by role and program."""
    roles, sizes = found.whole, {}
    for trainer, role in ((roles.policy, ""), (roles.critic, "critic")):
        assert isinstance(trainer, Trainer)
        # Programs take a base under adapters, whether or not it is another role's.
        base = shard_bytes(trainer.trained.abstract_frozen)
        params = shard_bytes(trainer.abstract_params) + base
        gradients = shard_bytes(trainer.trained.abstract_gradients)
        state = shard_bytes(trainer.state_in_a_step)
        sizes |= {(role, "predict"): params, (role, "grad"): params + gradients}
        sizes[role, "apply"] = state + gradients
    reader = roles.readers["reward model"]
    assert reader.resident == []  # it waits in the host's memory
    return sizes | {("reward model", "predict"): shard_bytes(reader.visiting)}


@pytest.mark.parametrize(
    "critic",
    [pytest.param(one, marks=pytest.mark.slow) for one in CRITICS],  # `test_update_memory.py`
)
def test_memory_of_each_role_is_that_of_its_compiled_programs(critic: str):
    found = build(critic)
    assert found.whole.critic is not None
    assert found.whole.critic.trained.shares_base == (critic == "one base")
    expected, seen = predicted(found), set()
    if critic != "whole":  # others have the same programs as before
        expected = {key: size for key, size in expected.items() if key[0] == "critic"}
    for job in of_training(found):
        if (key := (job.record.role, job.record.name)) in expected:
            memory = job.parts[0]().compile().memory_analysis()
            assert memory is not None
            assert memory.argument_size_in_bytes == pytest.approx(expected[key], rel=0.05)
            seen.add(key)
    assert seen == expected.keys()


NUMBERS = ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes")
counts = st.integers(0, 2**40)
splits = st.builds(Split, st.sampled_from([1, 2, 8]), st.sampled_from([1, 4]))
programs = st.builds(
    CompiledProgram,
    st.sampled_from(["decode", "reshard"]),
    splits,
    st.none() | splits,
    st.integers(0, 64),
    st.integers(0, 4096),
    layers=st.just(2),
    compiled_layers=st.just((2,)),
    **dict.fromkeys(NUMBERS, counts),
    error=st.none() | st.text(max_size=5),
)


@given(programs)
def test_a_record_is_the_same_after_a_file(program: CompiledProgram):
    assert CompiledProgram.from_json(json.loads(json.dumps(program.to_json()))) == program


def of_depth(layers: int, slope: Mapping[str, int], base: Mapping[str, int]) -> CompiledProgram:
    """A program whose numbers are affine."""
    return CompiledProgram(
        "decode",
        Split(1, 8),
        layers=layers,
        compiled_layers=(layers,),
        **{name: base[name] + layers * slope[name] for name in NUMBERS},  # pyright: ignore[reportArgumentType]
    )


affine = st.fixed_dictionaries({name: st.integers(0, 2**40) for name in NUMBERS})


@given(affine, affine, st.integers(3, 80))
def test_numbers_that_are_affine_in_the_layers_come_out_exactly(slope, base, layers):
    known = [of_depth(n, slope, base) for n in (4, 2)]
    found, right = at_depth(known, layers), of_depth(layers, slope, base)
    assert found.is_extrapolated == (layers != 4) and not right.is_extrapolated
    assert found == (replace(right, compiled_layers=(2, 4)) if layers != 4 else right)


def test_an_error_at_any_depth_is_the_error():
    failed = CompiledProgram("decode", Split(8, 1), layers=4, error="no")
    found = at_depth([CompiledProgram("decode", Split(8, 1), layers=2), failed], 32)
    assert (found.error, found.layers) == ("no", 32)


@given(programs, programs)
def test_parts_that_run_in_turn_add_up_but_share_temporaries(a, b):
    both = together([a, b])
    assert both.argument_bytes == a.argument_bytes + b.argument_bytes
    assert both.temp_bytes == max(a.temp_bytes, b.temp_bytes)
    assert both.error == (a.error or b.error or None)
