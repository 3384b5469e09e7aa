"""What is counted from a program's text, against what the program is known to do."""

import jax
import jax.numpy as jnp
import pytest

from pat_jax.profiling.absent.hlo_costs import count

M, K, N = 16, 32, 64
PRODUCT = 2 * M * K * N


def text_of(fun, *shapes) -> str:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(fun).lower(*args).compile().as_text() or ""


def test_a_product_counts_two_operations_a_multiplication_and_its_three_arrays():
    counts = count(text_of(lambda a, b: a @ b, (M, K), (K, N)))
    assert counts.flops == PRODUCT
    assert counts.num_bytes >= 4 * (M * K + K * N + M * N)


def test_a_batch_of_products_counts_each():
    text = text_of(lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b), (3, M, K), (3, K, N))
    assert count(text).flops == 3 * PRODUCT


def test_a_loop_of_known_length_counts_as_often_as_it_runs():
    def run(a, b):
        return jax.lax.fori_loop(0, 5, lambda _, a: jnp.tanh(a @ b), a)

    assert count(text_of(run, (M, K), (K, K))).flops == 5 * 2 * M * K * K


def test_a_loop_of_unknown_length_counts_once():
    def run(a, b):
        return jax.lax.while_loop(lambda a: a.sum() < 9, lambda a: a @ b + 1, a)

    assert count(text_of(run, (M, K), (K, K))).flops == 2 * M * K * K


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


def test_writing_a_row_in_place_counts_as_the_row():
    def run(table, row):
        return jax.lax.dynamic_update_slice_in_dim(table, jnp.tanh(row), 3, 0)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1000, 1000), (1, 1000))]
    text = jax.jit(run, donate_argnums=0).lower(*args).compile().as_text() or ""
    assert count(text).num_bytes < 10 * 4000


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
