"""The records: what becomes of several of them."""

import json
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.compiled import CompiledProgram, at_depth, together

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
def test_parts_that_run_in_turn_add_up_but_share_temporaries(
    a: CompiledProgram, b: CompiledProgram
):
    both = together([a, b])
    assert both.argument_bytes == a.argument_bytes + b.argument_bytes
    assert both.temp_bytes == max(a.temp_bytes, b.temp_bytes)
    assert both.error == (a.error or b.error or None)
