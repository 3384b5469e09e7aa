"""The records: what becomes of several of them."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.compiled import CompiledProgram, at_depth, together
from pat_jax.profiling.predict.update_work import Collective

NUMBERS = ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes", "flops", "bytes_accessed")
counts = st.integers(0, 2**40)
sents = st.builds(
    Collective,
    st.sampled_from(["all-reduce", "all-gather"]),
    st.integers(1, 2**30),
    st.sampled_from([2, 8]),
    st.integers(0, 2),
    st.integers(1, 9),
)
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
    collectives=st.lists(sents, max_size=4).map(tuple),
    kernels=st.lists(st.tuples(st.text(max_size=3), st.integers(1, 9)), max_size=2).map(tuple),
    error=st.none() | st.text(max_size=5),
)


@given(programs)
def test_a_record_is_the_same_after_a_file(program: CompiledProgram):
    assert CompiledProgram.from_json(json.loads(json.dumps(program.to_json()))) == program


def of_depth(layers: int, slope: Mapping[str, int], base: Mapping[str, int]) -> CompiledProgram:
    """A program whose numbers are affine: two sums a layer and one more, one gather."""
    sums = Collective("all-reduce", 4096, 8, 2, 2 * layers + 1)
    return CompiledProgram(
        "decode",
        Split(1, 8),
        layers=layers,
        compiled_layers=(layers,),
        **{name: base[name] + layers * slope[name] for name in NUMBERS},  # pyright: ignore[reportArgumentType]
        collectives=(Collective("all-gather", 77, 8, 2, 1), sums),
        kernels=(("attention", layers),),
    )


affine = st.fixed_dictionaries({name: st.integers(0, 2**40) for name in NUMBERS})


@given(affine, affine, st.integers(3, 80))
def test_numbers_that_are_affine_in_the_layers_come_out_exactly(slope, base, layers):
    known = [of_depth(n, slope, base) for n in (4, 2)]
    found, right = at_depth(known, layers), of_depth(layers, slope, base)
    assert found.is_extrapolated == (layers != 4) and not right.is_extrapolated
    same = {"compiled_layers": (2, 4), "flops": 0.0, "bytes_accessed": 0.0}
    if layers != 4:
        assert replace(found, **same) == replace(right, **same)
    assert found.flops == pytest.approx(right.flops)
    assert found.bytes_accessed == pytest.approx(right.bytes_accessed)


def test_collectives_put_into_one_by_the_compiler_keep_their_bytes():
    def program(layers: int, *sent: Collective) -> CompiledProgram:
        return CompiledProgram("transfer", Split(8, 1), layers=layers, collectives=sent)

    gather = ("all-gather", 8, 0)
    small = program(2, Collective(gather[0], 300, 8, 0, 1))
    large = program(4, Collective(gather[0], 250, 8, 0, 2))
    (found,) = at_depth([small, large], 6).collectives
    assert found.count == 3 and abs(3 * found.num_bytes - (300 + 2 * 200)) < 3  # one number for all


def test_an_error_at_any_depth_is_the_error():
    failed = CompiledProgram("decode", Split(8, 1), layers=4, error="no")
    found = at_depth([CompiledProgram("decode", Split(8, 1), layers=2), failed], 32)
    assert (found.error, found.layers) == ("no", 32)


@given(programs, programs)
def test_parts_that_run_in_turn_add_up_but_share_temporaries(
    a: CompiledProgram, b: CompiledProgram
):
    both = together([a, b])
    assert both.argument_bytes == a.argument_bytes + b.argument_bytes
    assert both.temp_bytes == max(a.temp_bytes, b.temp_bytes)
    sent = sum(s.num_bytes * s.count for p in (a, b) for s in p.collectives)
    assert sum(s.num_bytes * s.count for s in both.collectives) == sent
    assert both.error == (a.error or b.error or None)
