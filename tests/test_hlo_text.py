"""Reading compiled programs: what they send, how often loops run, which products count."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hlo_text import Sent, collectives, flops

GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}"


def module(*lines: str, others: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule made_up\n\n{others}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def found(text: str) -> list[tuple[str, float, int, int]]:
    every = collectives(text, in_loops=True)
    return [(each.kind, each.num_bytes, each.group, each.count) for each in every]


def test_what_starts_a_collective_has_its_operands_in_its_type():
    text = module(
        f"%a = ((bf16[8,4]{{1,0}}, f32[4]{{0}}), (bf16[2,4]{{1,0}}, f32[1]{{0}})) reduce-scatter-start(%x, %y), {GROUPS}",
        f"%b = (bf16[2]{{0}}, bf16[8]{{0}}) all-gather-start(%x), {GROUPS}",
        f"%c = ((bf16[2]{{0}}, f32[1]{{0}}), (bf16[8]{{0}}, f32[4]{{0}})) all-gather-start(%x, %y), {GROUPS}",
        f"%d = ((f32[4,2]{{1,0}}), f32[4,2]{{1,0}}) all-to-all-start(%x), {GROUPS}",
        "%e = (f32[16]{0:T(8,128)}, f32[16]{0:T(8,128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), "
        "source_target_pairs={{0,1},{1,0}}",
        f"%f = (f32[4]{{0}}, bf16[8]{{0}}) all-reduce-start(%x, %y), {GROUPS}",
        f"%g = f32[4]{{0}} all-reduce-start(%x), {GROUPS}",
        f"ROOT %h = (f32[2]{{0}}, f32[6]{{0}}) reduce-scatter(%x, %y), {GROUPS}",
    )
    assert found(text) == [
        ("reduce-scatter", 2 * 8 + 4, 4, 1),
        ("all-gather", 16, 4, 1),
        ("all-gather", 16 + 16, 4, 1),
        ("all-to-all", 32, 4, 1),
        ("collective-permute", 64, 2, 1),
        ("all-reduce", 16 + 16, 4, 1),
        ("all-reduce", 16, 4, 1),
        ("reduce-scatter", 32, 4, 1),
    ]


@pytest.mark.parametrize(
    "groups, hosts",
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 1),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2),
        ("replica_groups=[2,4]<=[8]", 1),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=[1,8]<=[8], use_global_device_ids=true", 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}", 1),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}", 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", 2),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, dimensions={0}", 2),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,2,2]T(2,1,0)) {'b'}", 2),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'b'}", 1),
    ],
)
def test_how_many_hosts_of_four_devices_a_group_is_spread_over(groups, hosts):
    text = module(f"ROOT %a = f32[8]{{0}} all-gather(%x), channel_id=1, {groups}")
    (one,) = collectives(text, per_host=4)
    assert one.hosts == hosts
    assert collectives(text)[0].hosts == 1


@pytest.mark.parametrize("pairs, hosts", [("{0,1},{1,0}", 1), ("{0,1},{3,4}", 2)])
def test_a_permutation_crosses_where_a_pair_does(pairs, hosts):
    text = module(
        f"ROOT %a = f32[8]{{0}} collective-permute(%x), channel_id=1, source_target_pairs={{{pairs}}}"
    )
    assert collectives(text, per_host=4)[0].hosts == hosts


@pytest.mark.parametrize(
    "kind, num_bytes, group, expected",
    [
        # By hand: 2 hosts of 4 devices. A gather of 80 bytes over all: each host's 40 go to the other.
        ("all-gather", 80, 8, 40),
        # Over pairs, one of each host: each of four devices sends its half.
        ("all-gather", 80, 2, 4 * 40),
        # A sum of 80 bytes in each device: half a sum there, half a result back.
        ("all-reduce", 80, 8, 80),
        # Scattered: of 8 shares of 10, the four that the other host wants.
        ("reduce-scatter", 10, 8, 40),
        # Each device has 80 bytes for all, half of them for the other host.
        ("all-to-all", 80, 8, 4 * 40),
    ],
)
def test_what_leaves_a_host(kind, num_bytes, group, expected):
    assert Sent(kind, num_bytes, group, 0, 1, hosts=2).leaving(4) == expected
    assert Sent(kind, num_bytes, group, 0, 3, hosts=2).leaving(4) == 3 * expected
    assert Sent(kind, num_bytes, group, 0, 1).leaving(4) == 0


LOOPS = """
%body.2 (s: (s32[])) -> (s32[]) {
  ROOT %q = f32[4]{0} all-reduce(%s), channel_id=1, replica_groups={{0,1,2,3}}
}
%cond.2 (s: (s32[])) -> pred[] {
  ROOT %t = pred[] parameter(0)
}
%body.1 (s: (s32[])) -> (s32[]) {
  %p = f32[8]{0} all-gather(%s), channel_id=1, replica_groups={{0,1,2,3}}
  ROOT %w = (s32[]) while(%s), condition=%cond.2, body=%body.2, backend_config={"known_trip_count":{"n":"3"}}
}
%cond.1 (s: (s32[])) -> pred[] {
  ROOT %t = pred[] parameter(0)
}
"""


def test_what_is_in_loops_is_sent_as_often_as_they_run():
    line = 'ROOT %v = (s32[]) while(%x), condition=%cond.1, body=%body.1, backend_config={"known_trip_count":{"n":"5"}}'
    text = module(line, others=LOOPS)
    assert found(text) == [("all-gather", 32, 4, 5), ("all-reduce", 16, 4, 15)]
    once = [(each.kind, each.depth, each.count) for each in collectives(text)]
    assert once == [("all-gather", 1, 1), ("all-reduce", 2, 1)]


FUSED = """
%fused.1 (a: f32[2]) -> (f32[2], f32[8], u32[]) {
  %g.1 = f32[8]{0} all-gather(%a), channel_id=7, replica_groups={{0,1,2,3}}
  ROOT %c.1 = (f32[2]{0}, f32[8]{0}, u32[]) custom-call(%a, %g.1), custom_call_target="AsyncCollectiveStart"
}
%async_collective_fusion.4 (a: f32[2], b: f32[8], c: u32[]) -> (f32[2], f32[8], u32[]) {
  ROOT %g.2 = f32[8]{0} all-gather(%a), channel_id=7, replica_groups={{0,1,2,3}}
}
%fused.3 (a: f32[2], b: f32[8], c: u32[]) -> f32[8] {
  %g.3 = f32[8]{0} all-gather(%a), channel_id=7, replica_groups={{0,1,2,3}}
  ROOT %c.3 = f32[8]{0} custom-call(%a, %g.3), custom_call_target="AsyncCollectiveDone"
}
"""


def test_a_collective_that_fusions_go_on_with_counts_once():
    """As libtpu 0.0.52 writes it; two layers have the same channel."""
    lines = [
        f"%x.{i} = (f32[2], f32[8], u32[]) fusion(%x), kind=kCustom, calls=%{name}"
        for i in range(2)
        for name in ("fused.1", "async_collective_fusion.4", "fused.3")
    ]
    assert found(module(*lines, others=FUSED)) == [("all-gather", 32, 4, 1)] * 2


SCATTERED = """
%all-reduce-scatter.clone.1 (a: bf16[16,8]) -> bf16[4,8] {
  %s = bf16[16,8]{1,0} all-reduce(%a), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %d = bf16[4,8]{1,0} dynamic-slice(%s, %i, %j), dynamic_slice_sizes={4,8}
}
"""


def test_a_sum_of_which_a_fusion_keeps_a_part_is_scattered():
    """As libtpu 0.0.52 writes it of many rows."""
    line = "ROOT %f = bf16[4,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.clone.1"
    assert found(module(line, others=SCATTERED)) == [("reduce-scatter", 64, 4, 1)]


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
    assert flops(text) == 2 * 16**3 * len(range(start, stop, step))
    for known, unknown in (
        ("direction=LT", "direction=NE"),
        ("tuple(%copy.1, %x.2)", "tuple(%n.2, %x.2)"),
        ("add(%copy.2, %by.1)", "add(%copy.2, %at.1)"),
    ):
        assert flops(text.replace(known, unknown)) == 2 * 16**3


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
    assert flops(GEMM) == 2 * 8 * 4096 * 512


def test_of_branches_the_cheapest_counts():
    def run(a, b, wanted):
        return jax.lax.cond(wanted[0] > 0, lambda: a @ b @ b, lambda: a @ b)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 32), (32, 32), (1,))]
    text = jax.jit(run).lower(*args).compile().as_text()
    assert text is not None and flops(text) == 2 * 16 * 32 * 32


def test_a_batch_of_products_as_one_convolution_counts_its_values():
    """As a TPU's compiler writes eight products of 16 x 32 by 32 x 4."""
    line = (
        "ROOT %c = bf16[8,16,4]{2,1,0} convolution(%a, %b), "
        "window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf"
    )
    text = module(
        "%a = bf16[8,16,32]{2,1,0} parameter(0)", "%b = bf16[8,32,4]{2,1,0} parameter(1)", line
    )
    assert flops(text) == 2 * 8 * 16 * 32 * 4
