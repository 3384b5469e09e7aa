"""Reading compiled programs: what they send. `test_expert_programs.py` has products and loops."""

import pytest

from tests.hlo_text import Sent, collectives

GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}"


def module(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule made_up\n\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


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
    every = [(each.kind, each.num_bytes, each.group, each.count) for each in collectives(text)]
    assert every == [
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
