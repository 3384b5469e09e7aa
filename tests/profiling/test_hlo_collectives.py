"""What the text of a compiled program says it sends: bytes, trips of loops, and each collective once."""

import pytest

from pat_jax.profiling.cross_compile.hlo import collectives, loop_trips
from pat_jax.profiling.predict.update_work import Collective

GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}"


def module(*lines: str, others: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule made_up\n\n{others}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def found(text: str) -> list[tuple[str, float, int, int]]:
    every = collectives(text, trips=loop_trips(text))
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
    assert Collective(kind, num_bytes, group, 0, 1, hosts=2).leaving(4) == expected
    assert Collective(kind, num_bytes, group, 0, 3, hosts=2).leaving(4) == 3 * expected
    assert Collective(kind, num_bytes, group, 0, 1).leaving(4) == 0


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
    assert loop_trips(text) == {"body.1": 5, "body.2": 3}
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
