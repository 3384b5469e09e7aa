"""What the text of a compiled program says it sends: bytes, trips of loops, and each collective once."""

from pat_jax.profiling.cross_compile.hlo import collectives
from pat_jax.profiling.cross_compile.hlo_loops import loop_trips

GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}"


def module(*lines: str, others: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule made_up\n\n{others}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def found(text: str) -> list[tuple[str, int, int, int]]:
    every = collectives(text, trips=loop_trips(text))
    return [(each.name, each.num_bytes, each.group, each.times) for each in every]


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
    once = [(each.name, each.depth, each.times) for each in collectives(text)]
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
