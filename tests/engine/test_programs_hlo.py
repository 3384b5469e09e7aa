"""What the compiled programs send: nothing, or exactly what the design says."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations

import jax
import numpy as np
import pytest
from fakes import SETTINGS, SPLITS, subject

from pat_jax.engine.device.pages import reshard as switch
from pat_jax.engine.device.pages.pages import Exchange
from pat_jax.engine.engine import RolloutEngine
from pat_jax.layout.layout import Backend, Layout
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable
from tests.hlo_text import Sent, called, collectives, computations
from tests.lossless import MODELS


def pairs(name: str, *, up: bool) -> list[tuple[Split, Split]]:
    """Of layouts, by whether the second has the larger TP."""
    every = permutations(subject(name).engine.layouts, 2)
    return [pair for pair in every if (pair[1].tp > pair[0].tp) == up]


def hlo(name: str, key: Key, weights: WeightFormat = "auto") -> str:
    return subject(name, weights).engine.programs[key].as_text()


def programs(
    name: str, kind: str, source=None, target=None, weights: WeightFormat = "auto"
) -> list[Key]:
    table = subject(name, weights).engine.programs
    found = [
        key
        for key in (*table, *table.missing())
        if key.name == kind and source in (None, key.split) and target in (None, key.target)
    ]
    assert found
    return found


def received(one: Sent) -> float:
    """Bytes that come from other devices, of an all-to-all or all-gather."""
    return one.num_bytes * (one.group - 1) / one.group


@pytest.mark.parametrize("name", MODELS)
def test_raising_tp_reslices_without_any_communication(name):
    for source, target in pairs(name, up=True):
        for key in programs(name, "reshard", source, target):
            assert collectives(hlo(name, key)) == []


def test_a_decode_step_reads_quantized_weights_and_sends_what_it_always_sends():
    config = subject("kv2").policy.config
    keys = programs("kv2", "decode", weights="int8")
    # The most rows of the longest contexts, with whole heads and with parts of them.
    largest = {key.split: key for key in sorted(keys, key=lambda key: key[2:4])}
    for key in (largest[SPLITS[0]], largest[SPLITS[-1]]):
        text = hlo("kv2", key, "int8")
        step = [c.kind for c in collectives(text) if c.depth == 2]
        sums = ["all-reduce"] * (2 * config.num_layers + 1)
        assert sorted(step) == ([] if key.split.tp == 1 else ["all-gather", *sums])
        # Both loops carry the values, and none of them what those are converted to.
        loops = [line for line in text.splitlines() if " while(" in line and "s8[" in line]
        assert [line.count("s8[") for line in loops] == [7 * config.num_layers] * 2
        floats = f"f32[{config.embed_dim},{config.mlp_dim // key.split.tp}]"
        assert not any(floats in line for line in loops)


@cache
def lowering(name: str) -> ProgramTable:
    """The programs that gather weights where devices have memories of their own."""
    # Their own copies: what a set of specs has found out of a pair of layouts it remembers.
    specs, table = replace(subject(name).engine.specs), ProgramTable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layout, "backend", replace(Backend.of("cpu"), gathers_on_host=False))
        for source, target in pairs(name, up=False):
            specs.declare_reshard(table, *(specs.layouts[split] for split in (source, target)))
    table.compile_all(threads=2)
    return table


@pytest.mark.parametrize("name", MODELS)
def test_lowering_tp_only_gathers_weights(name):
    table = lowering(name)
    for pair in pairs(name, up=False):
        keys = [key for key in table.keys("reshard") if (key.split, key.target) == pair]
        assert keys
        for key in keys:
            text = table[key].as_text()
            assert {c.kind for c in collectives(text)} == {"all-gather"}


def part_bytes(name: str, key: Key) -> float:
    """Of the KV heads that a wide device holds, one round of a replica."""
    specs, config = subject(name).engine.specs, subject(name).policy.config
    assert key.target is not None
    wide = max((key.split, key.target), key=lambda split: split.tp)
    heads = max(1, config.num_kv_heads // wide.tp)
    return 4 * 2 * config.num_layers * key.rows * specs.page_size * heads * config.head_dim


def exchanges(name: str, kind: str) -> Iterator[tuple[Key, Exchange]]:
    """The programs of a kind of round, and who talks to whom in each."""
    layouts = subject(name).engine.layouts
    for key in programs(name, kind):
        assert key.target is not None
        yield key, Exchange.between(layouts[key.split], layouts[key.target])


@pytest.mark.parametrize("name", MODELS)
def test_a_round_of_all_groups_sends_its_pages_and_nothing_else(name):
    """One all-to-all, an all-gather of copies."""
    for key, exchange in exchanges(name, "exchange"):
        found = collectives(hlo(name, key))
        expected = {"all-to-all"} if exchange.heads else set()
        if exchange.copies and exchange.is_up:
            expected.add("all-gather")
        assert {c.kind for c in found} == expected
        sent = sum(map(received, found)) * exchange.narrow.mesh.size
        assert sent == exchange.narrow.split.dp * exchange.copies_sent * part_bytes(name, key)


@pytest.mark.parametrize("name", MODELS)
def test_a_round_of_one_group_sends_its_pages_alone(name):
    """One branch for each replica, of which one runs."""
    for key, exchange in exchanges(name, "exchange_one"):
        text = hlo(name, key)
        if not exchange.copies_sent:  # whoever needs a page has it
            assert collectives(text) == []
            continue
        entry, bodies = computations(text)
        (switch,) = (line for line in bodies[entry] if " conditional(" in line)
        branches = [branch for role, branch in called(switch) if role == "branch"]
        assert len(branches) == exchange.narrow.split.dp
        for branch in branches:
            sent = collectives(text, branch)
            assert {c.kind for c in sent} == {"collective-permute"}
            num_bytes = sum(c.num_bytes * c.group for c in sent)  # here: the pairs that talk
            assert num_bytes == exchange.copies_sent * part_bytes(name, key)


@pytest.mark.parametrize("name", MODELS)
def test_pages_go_to_another_group_in_one_permutation(name):
    """Every device sends one buffer to one other device, and nothing else; by each distance."""
    specs = subject(name).engine.specs
    keys = programs(name, "shift")
    assert {key.split for key in keys} == {split for split in specs.layouts if split.dp > 1}
    for key in keys:
        found = collectives(hlo(name, key))
        assert len(found) == key.split.dp - 1
        buffer = bytes_a_device([specs.buffer(specs.layouts[key.split], key.rows)])
        for one in found:
            assert (one.kind, one.depth, one.group) == ("collective-permute", 0, 8)
            assert one.num_bytes == buffer


@pytest.mark.parametrize("name", MODELS)
def test_moving_pages_is_local_and_in_place(name):
    specs = subject(name).engine.specs
    for kind in ("view", "pack", "unpack", "copy_pages", "allocate"):
        for key in programs(name, kind):
            assert collectives(hlo(name, key)) == []
            memory = subject(name).engine.programs[key].memory_analysis()
            layout = subject(name).engine.layouts[key.split]
            pool = bytes_a_device(jax.tree.leaves(specs.pool(layout)))
            if kind in ("view", "unpack", "copy_pages"):  # the pool is donated
                assert memory.alias_size_in_bytes == pool
            # Besides its pages nothing is copied, least of all the pool.
            pages = bytes_a_device([specs.buffer(layout, max(key.rows, 1))])
            assert memory.temp_size_in_bytes <= 3 * pages + 1024


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_no_step_copies_the_pool(kind):
    """What a program takes besides its arguments does not depend on the size of the pool."""
    config, taken = SETTINGS["kv2"], []
    for kv_pages in (200, 20_000):
        engine = RolloutEngine(
            subject("kv2").policy,
            jax.devices(),
            replace(config.rollout, kv_pages=kv_pages),
            capacity=config.sequences,
            eos_ids=(0,),
        )
        for key in [key for key in engine.programs.missing() if key.name == kind]:
            if key.length == engine.specs.buckets.lengths[-1] and key.split.tp == 4:
                engine.programs.compile(key)
        pools = {
            split: bytes_a_device(jax.tree.leaves(engine.specs.pool(layout)))
            for split, layout in engine.layouts.items()
        }
        found = {key: engine.programs[key].memory_analysis() for key in engine.programs.keys(kind)}
        assert all(x.alias_size_in_bytes >= pools[key.split] for key, x in found.items())
        taken.append({key: x.temp_size_in_bytes for key, x in found.items()})
    assert taken[0] and taken[0] == taken[1]


DECODING = [pytest.param(x, marks=[pytest.mark.slow] * (x != "kv2")) for x in MODELS]


@pytest.mark.parametrize("name", DECODING)
def test_a_decode_step_sums_twice_a_layer(name):
    config = subject(name).policy.config
    for key in programs(name, "decode"):
        step = [(c.kind, c.num_bytes) for c in collectives(hlo(name, key)) if c.depth == 2]
        hidden = ("all-reduce", key.rows * config.embed_dim * 4)
        logits = ("all-gather", key.rows * config.padded_vocab_size * 4)
        if key.split.tp == 1:
            assert step == []
        else:
            assert sorted(step) == sorted([hidden] * (2 * config.num_layers + 1) + [logits])


@pytest.mark.parametrize("name", DECODING)
def test_live_rows_are_counted_once_in_several_steps(name):
    """Before the first step, then in the outer loop, with whether pages suffice: two numbers. One
    device or replica counts for itself."""
    for key in programs(name, "decode"):
        rest = [c for c in collectives(hlo(name, key)) if c.depth < 2]
        assert sorted(c.depth for c in rest) == ([0, 1] if key.split.dp > 1 else [])
        assert {(c.kind, c.num_bytes, c.group) for c in rest} <= {("all-reduce", 8, key.split.dp)}


def test_prefill_computes_no_logits():
    layers = subject("kv2").policy.config.num_layers
    for key in programs("kv2", "prefill"):
        found = [c.kind for c in collectives(hlo("kv2", key))]
        # The last sum of the last layer has no reader: the newest token is left to decoding.
        assert len(found) <= (2 * layers + 1 if key.split.tp > 1 else 0)
        assert set(found) <= {"all-reduce"}


def bytes_a_device(arrays) -> int:
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in arrays)


@pytest.mark.parametrize("name", MODELS)
def test_a_reslice_holds_one_chunk_more_than_the_weights(name, monkeypatch):
    """Peak of the live arrays, looked at when each chunk's new leaves are there."""
    engine = subject(name).engine
    wait, peaks = jax.block_until_ready, []

    def running() -> int:
        # On one device alone: views of shards, of arrays that are counted.
        arrays = [x for x in jax.live_arrays() if len(x.devices()) == engine.mesh.size]
        return bytes_a_device(x for x in arrays if id(x) not in held)

    def watched(new):
        peaks.append(running())
        return wait(new)

    for source, target in permutations(engine.layouts, 2):
        # Held, not only named: the identity of an array that went would pass to a new one.
        held = {id(x): x for x in jax.live_arrays()}
        layouts = engine.layouts[source], engine.layouts[target]
        engine.set_weights(subject(name).weights(layouts[0]), layouts[0])
        old = bytes_a_device(jax.tree.leaves(engine.params))
        peaks.clear()
        with monkeypatch.context() as patch:
            patch.setattr(switch.jax, "block_until_ready", watched)
            engine.weights.reshard(layouts[1])
        new = bytes_a_device(jax.tree.leaves(engine.params))
        left = running()
        leaves = jax.tree.leaves(engine.params)
        plan = engine.specs.reshard(*layouts)
        chunk = max(bytes_a_device(leaves[i] for i in run) for run in plan.runs)
        assert len(peaks) == len(plan.runs) > 2
        assert max(peaks) <= max(old, new) + chunk < old + new
        assert chunk <= plan.extra_bytes
        assert left == new
        engine.release_weights()
