"""What is counted from a program's text, against what the program is known to do."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_jax.profiling.cross_compile.hlo_costs import count

M, K = 16, 32


def text_of(fun, *shapes) -> str:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(fun).lower(*args).compile().as_text() or ""


@pytest.mark.parametrize(("inside", "products"), [(0, 2 + 4 * 1), (1, 4), (2, 1)])
def test_what_lies_inside_loops_is_told_from_what_lies_before_them(inside, products):
    def run(a, b):
        def outer(a):
            return jax.lax.fori_loop(0, 4, lambda _, a: jnp.tanh(a @ b), a)

        return jax.lax.while_loop(lambda a: a.sum() < 9, outer, jnp.tanh(a @ b) @ b)

    assert count(text_of(run, (M, K), (K, K)), inside=inside).flops == products * 2 * M * K * K


def test_a_slice_of_a_large_array_counts_as_the_slice():
    def run(table, at):
        return jnp.tanh(jax.lax.dynamic_slice_in_dim(table, at.astype(int)[0], 2))

    small = count(text_of(run, (1000, 1000), (1,))).num_bytes
    assert 2 * 2 * 4000 <= small < 10 * 4000


# As a TPU multiplies by one layer's weights of many: the slice is a fusion inside of the product's.
SLICED = """
HloModule m

%sliced (stacked: bf16[8,512,4096], layer: s32[]) -> bf16[512,4096] {
  %stacked = bf16[8,512,4096]{2,1,0} parameter(0)
  %layer = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,512,4096]{2,1,0} dynamic-slice(%stacked, %layer, %zero, %zero), dynamic_slice_sizes={1,512,4096}
  ROOT %view = bf16[512,4096]{1,0} bitcast(%slice)
}

%turned (x: bf16[64,4096]) -> bf16[64,4096] {
  %x.1 = bf16[64,4096]{1,0} parameter(0)
  ROOT %view.1 = bf16[64,4096]{1,0} bitcast(%x.1)
}

%product (stacked.1: bf16[8,512,4096], layer.1: s32[], x: bf16[64,4096]) -> bf16[64,512] {
  %stacked.1 = bf16[8,512,4096]{2,1,0} parameter(0)
  %layer.1 = s32[] parameter(1)
  %x = bf16[64,4096]{1,0} parameter(2)
  %weights = bf16[512,4096]{1,0} fusion(%stacked.1, %layer.1), kind=kLoop, calls=%sliced
  %rows = bf16[64,4096]{1,0} fusion(%x), kind=kLoop, calls=%turned
  ROOT %out = bf16[64,512]{1,0} convolution(%rows, %weights), dim_labels=bf_oi->bf
}

ENTRY %main (stacked.2: bf16[8,512,4096], layer.2: s32[], x.2: bf16[64,4096]) -> bf16[64,512] {
  %stacked.2 = bf16[8,512,4096]{2,1,0} parameter(0)
  %layer.2 = s32[] parameter(1)
  %x.2 = bf16[64,4096]{1,0} parameter(2)
  ROOT %done = bf16[64,512]{1,0} fusion(%stacked.2, %layer.2, %x.2), kind=kOutput, calls=%product
}
"""


def test_a_slice_that_a_product_takes_inside_of_its_fusion_counts_as_the_slice():
    counts, scalar = count(SLICED), 4
    assert counts.num_bytes == 2 * (512 * 4096 + 64 * 4096 + 64 * 512) + scalar
    assert counts.flops == 2 * 64 * 512 * 4096


def test_writing_a_row_in_place_counts_as_the_row():
    def run(table, row):
        return jax.lax.dynamic_update_slice_in_dim(table, jnp.tanh(row), 3, 0)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1000, 1000), (1, 1000))]
    text = jax.jit(run, donate_argnums=0).lower(*args).compile().as_text() or ""
    assert count(text).num_bytes < 10 * 4000


@given(
    sizes=st.tuples(*[st.integers(3, 7)] * 2),
    kernel=st.tuples(*[st.integers(1, 3)] * 2),
    strides=st.tuples(*[st.integers(1, 3)] * 2),
    padding=st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 2))] * 2),
    dilations=st.tuples(*[st.tuples(st.integers(1, 3), st.integers(1, 2))] * 2),
    groups=st.sampled_from([1, 2]),
)
@settings(max_examples=15, deadline=None)
def test_a_convolution_counts_what_meets_a_value(
    sizes, kernel, strides, padding, dilations, groups
):
    """Of ones, each product is one: their sum is how many there are."""

    def run(image, weights):
        return jax.lax.conv_general_dilated(
            image,
            weights,
            strides,
            padding,
            lhs_dilation=[one for one, _ in dilations],
            rhs_dilation=[other for _, other in dilations],
            feature_group_count=groups,
        )

    shapes = (2, 4, *sizes), (6, 4 // groups, *kernel)
    ones = [jnp.ones(shape) for shape in shapes]
    try:
        products = int(run(*ones).sum())
    except ValueError:  # a window larger than what it is moved over
        return
    text = jax.jit(run).lower(*ones).compile().as_text() or ""
    assert count(text).flops == 2 * products


LOOP = """
HloModule jit_run, is_scheduled=true

%body.1 (carry.1: (s32[], bf16[16,16])) -> (s32[], bf16[16,16]) {
  %carry.1 = (s32[]{:T(128)}, bf16[16,16]{1,0:T(8,128)(2,1)}) parameter(0)
  %by.1 = s32[]{:T(128)} constant(STEP)
  %at.1 = s32[]{:T(128)} get-tuple-element(%carry.1), index=0
  %copy.2 = s32[]{:T(128)} copy(%at.1)
  %next.1 = s32[]{:T(128)} add(%copy.2, %by.1)
  %x.1 = bf16[16,16]{1,0:T(8,128)(2,1)} get-tuple-element(%carry.1), index=1
  %y.1 = bf16[16,16]{1,0:T(8,128)(2,1)} convolution(%x.1, %x.1), dim_labels=bf_io->bf
  ROOT %out.1 = (s32[]{:T(128)}, bf16[16,16]{1,0:T(8,128)(2,1)}) tuple(%next.1, %y.1)
}

%condition.1 (carry.2: (s32[], bf16[16,16])) -> pred[] {
  %most.1 = s32[]{:T(128)} constant(STOP)
  %carry.2 = (s32[]{:T(128)}, bf16[16,16]{1,0:T(8,128)(2,1)}) parameter(0)
  %at.2 = s32[]{:T(128)} get-tuple-element(%carry.2), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%at.2, %most.1), direction=LT
}

ENTRY %main.2 (x.2: bf16[16,16], n.2: s32[]) -> bf16[16,16] {
  %x.2 = bf16[16,16]{1,0:T(8,128)(2,1)} parameter(0)
  %n.2 = s32[]{:T(128)} parameter(1)
  %zero.1 = s32[]{:T(128)} constant(START)
  %copy.1 = s32[]{:T(128)} copy(%zero.1)
  %in.1 = (s32[]{:T(128)}, bf16[16,16]{1,0:T(8,128)(2,1)}) tuple(%copy.1, %x.2)
  %while.1 = (s32[]{:T(128)}, bf16[16,16]{1,0:T(8,128)(2,1)}) while(%in.1), condition=%condition.1, body=%body.1
  ROOT %got.2 = bf16[16,16]{1,0:T(8,128)(2,1)} get-tuple-element(%while.1), index=1
}
"""


@given(st.integers(-3, 9), st.integers(1, 40), st.integers(1, 5))
def test_a_loop_whose_compiler_says_nothing_is_told_by_its_counter(start, trips, step):
    """As a TPU's are. `range` knows how often it runs."""
    stop = start + trips
    numbers = {"START": start, "STOP": stop, "STEP": step}
    text = LOOP
    for name, number in numbers.items():
        text = text.replace(name, str(number))
    assert count(text).flops == 2 * 16**3 * len(range(start, stop, step))
    for known, unknown in (
        ("direction=LT", "direction=NE"),
        ("tuple(%copy.1, %x.2)", "tuple(%n.2, %x.2)"),
        ("add(%copy.2, %by.1)", "add(%copy.2, %at.1)"),
    ):
        assert count(text.replace(known, unknown)).flops == 2 * 16**3


GEMM = """
HloModule jit_run, is_scheduled=true

ENTRY %main.1 (a.1: bf16[8,4096], b.1: bf16[512,4096]) -> bf16[8,512] {
  %a.1 = bf16[8,4096]{1,0} parameter(0)
  %b.1 = bf16[512,4096]{1,0} parameter(1)
  %gemm.1 = (bf16[8,512]{1,0}, s8[64]{0}) custom-call(%a.1, %b.1), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %kernel.1 = bf16[8,512]{1,0} custom-call(%a.1, %b.1), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %got.1 = bf16[8,512]{1,0} get-tuple-element(%gemm.1), index=0
}
"""


def test_a_library_product_counts_and_a_kernel_does_not():
    counts = count(GEMM)
    assert counts.flops == 2 * 8 * 4096 * 512
    assert counts.num_bytes == 2 * (8 * 4096 + 512 * 4096 + 8 * 512) + 64


def test_of_branches_the_cheapest_counts():
    def run(a, b, wanted):
        return jax.lax.cond(wanted[0] > 0, lambda: a @ b @ b, lambda: a @ b)

    assert count(text_of(run, (M, K), (K, K), (1,))).flops == 2 * M * K * K


def test_what_stays_in_vector_memory_is_neither_read_nor_written():
    text = GEMM.replace("bf16[512,4096]{1,0}", "bf16[512,4096]{1,0:T(8,128)(2,1)S(1)}")
    assert count(text).num_bytes == 2 * (8 * 4096 + 8 * 512) + 64
