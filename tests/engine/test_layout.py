"""Which mesh axes a layout takes, how KV heads fall on them, and which layouts there are."""

import re
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from fakes import SPLITS, FakeDevice, fake_devices, made_up_latency
from jax.sharding import PartitionSpec
from runs import TINY

from pat_jax.config.command_line import parse
from pat_jax.engine.sizing.layout_choice import within_hosts, worth_planning
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh, hosts_of
from pat_jax.layout.rules import RULES
from pat_jax.models.config import ExpertsConfig, ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import PRESETS
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.memory import USABLE, MemoryModel
from pat_jax.planning.types import Split
from pat_jax.run.start.setup import build

CONFIG = ModelConfig("llama", 61, 16, 32, 1, 8, 8, 4, vocab_multiple=8)


def layouts(num_devices: int = 8, **changes) -> dict[Split, Layout]:
    return layout_chain(factored_mesh(jax.devices()[:num_devices]), replace(CONFIG, **changes))[0]


def test_the_mesh_keeps_neighbours_innermost():
    mesh = factored_mesh(jax.devices()[::-1])
    assert mesh.devices.shape == (2, 2, 2)
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    np.testing.assert_array_equal(ids.reshape(-1), sorted(ids.reshape(-1)))


def test_tp_takes_the_innermost_axes_and_dp_counts_the_rest_from_inside():
    chain = layouts()
    axes = {split: (layout.dp_axes, layout.tp_axes) for split, layout in chain.items()}
    assert axes == {
        Split(8, 1): (("axis2", "axis1", "axis0"), ()),
        Split(4, 2): (("axis1", "axis0"), ("axis2",)),
        Split(2, 4): (("axis0",), ("axis2", "axis1")),
        Split(1, 8): ((), ("axis2", "axis1", "axis0")),
    }
    assert tuple(chain) == SPLITS


@pytest.mark.parametrize(
    "kv_heads, num_heads, kv_sizes",
    [(8, 8, (1, 2, 4, 8)), (6, 24, (1, 2, 2, 2)), (2, 8, (1, 2, 2, 2)), (1, 8, (1, 1, 1, 1))],
)
def test_kv_heads_take_the_leading_axes_that_divide_them(kv_heads, num_heads, kv_sizes):
    for layout, size in zip(
        layouts(num_kv_heads=kv_heads, num_heads=num_heads).values(), kv_sizes, strict=True
    ):
        assert layout.size(layout.kv_axes) == size
        assert layout.kv_axes == layout.tp_axes[: len(layout.kv_axes)]
        # Query heads of one KV head share out the other axes.
        assert layout.mesh_axes("kv_heads") + layout.mesh_axes("queries_per_kv") == layout.tp_axes


def test_the_run_of_kv_axes_does_not_jump_over_an_axis():
    """Factors 2 · 3, innermost 3: four KV heads divide by 2, but 3 comes first."""
    layout = layouts(6, num_kv_heads=4, num_heads=24, mlp_dim=48, vocab_multiple=24)[Split(1, 6)]
    assert layout.kv_axes == ()
    assert [layout.mesh.shape[axis] for axis in layout.tp_axes] == [3, 2]


def test_every_parameter_axis_has_a_rule_and_no_mesh_axis_twice():
    for config in PRESETS.values():
        policy = Policy.from_config(replace(config, num_layers=1, vocab_multiple=8))
        chain, _ = layout_chain(factored_mesh(jax.devices()), policy.config)
        for layout in chain.values():
            for role in ("rollout", "train"):
                for sharding in jax.tree.leaves(layout.param_shardings(policy, role)):
                    used = [axis for part in sharding.spec if part for axis in part]
                    assert len(used) == len(set(used))


def test_the_trainer_splits_the_embedding_over_dp_and_the_rollout_does_not():
    layout = layouts()[Split(4, 2)]
    assert layout.mesh_axes("embed", "train") == layout.dp_axes
    assert layout.mesh_axes("embed") == ()
    odd = layouts(embed_dim=18)[Split(4, 2)]
    assert odd.size(odd.mesh_axes("embed", "train")) == 2  # 18 = 2 · 9


@pytest.mark.parametrize(
    ("num_experts", "axes"),
    [(16, ("axis2", "axis1", "axis0")), (12, ("axis2", "axis1")), (3, ())],
)
def test_experts_are_where_they_are_in_every_layout(num_experts, axes):
    """On as many of the innermost devices as divide them, in both roles."""
    chain = layouts(experts=ExpertsConfig(num_experts, 2, 16))
    assert tuple(chain) == SPLITS
    specs = {layout.spec("expert", role=role) for layout in chain.values() for role in RULES}
    assert specs == {PartitionSpec(axes or None)}


@pytest.mark.parametrize(
    "changes, kept, reason",
    [
        ({"mlp_dim": 36}, (1, 2, 4), r"dp1tp8 needs mlp_dim = 36 divisible by 8"),
        ({"num_heads": 6, "num_kv_heads": 2}, (1, 2), r"dp2tp4 needs num_heads / num_kv_heads = 3"),
        ({"vocab_multiple": 2}, (1, 2), r"dp2tp4 needs padded vocab_size = 62 divisible by 4"),
    ],
)
def test_layouts_that_do_not_divide_are_dropped_with_a_reason(changes, kept, reason):
    chain, dropped = layout_chain(factored_mesh(jax.devices()), replace(CONFIG, **changes))
    assert tuple(split.tp for split in chain) == kept
    assert len(chain) + len(dropped) == 4
    assert any(re.search(reason, text) for text in dropped)


@pytest.mark.parametrize("per_host", [(4, 4), (2, 2, 2, 2), (4, 4, 4), (6, 6), (8,), (1, 1, 1)])
def test_tp_fills_a_host_before_it_crosses(per_host):
    """Also where the smallest prime factor of all devices is none of a host's."""
    mesh = factored_mesh(fake_devices(*per_host))
    config = replace(CONFIG, num_heads=24, num_kv_heads=24, mlp_dim=48, vocab_multiple=24)
    chain, _ = layout_chain(mesh, config)
    assert {split.tp for split in chain if not layout_crosses(chain, split)} == {
        split.tp for split in chain if per_host[0] % split.tp == 0
    }
    assert per_host[0] in {split.tp for split in chain}
    for layout in chain.values():
        assert layout.crosses_hosts == layout_crosses(chain, layout.split)


def layout_crosses(chain: dict[Split, Layout], split: Split) -> bool:
    """By the model's shards: devices with different parts of a copy, on different hosts."""
    layout = chain[split]
    replicas = {}
    for index, device in np.ndenumerate(layout.mesh.devices):
        names = dict(zip(layout.mesh.axis_names, index, strict=True))
        replica = tuple(names[axis] for axis in layout.dp_axes)
        replicas.setdefault(replica, set()).add(device.process_index)
    return any(len(hosts) > 1 for hosts in replicas.values())


def test_hosts_of_unequal_size_keep_their_devices_together():
    mesh = factored_mesh(fake_devices(3, 1))
    assert [device.process_index for device in mesh.devices.reshape(-1)] == [0, 0, 0, 1]
    assert mesh.devices.shape == (2, 2)


def test_a_slice_is_one_host_whatever_its_processes():
    devices = [FakeDevice(i, process_index=i, slice_index=i // 4) for i in range(8)]
    chain, _ = layout_chain(factored_mesh(devices), CONFIG)
    assert [layout.crosses_hosts for layout in chain.values()] == [False, False, False, True]


def test_hosts_of_devices_that_are_not_there_are_told_apart_as_those_that_are():
    """An absent GPU has no hardware id and says slice 0; an absent TPU says nothing of slices."""

    @dataclass(frozen=True)
    class AbsentDevice(FakeDevice):
        local_hardware_id: int | None = None

    gpus = [AbsentDevice(i, process_index=i // 4, slice_index=0) for i in range(8)]
    chips = [FakeDevice(i, process_index=i // 4, platform="tpu") for i in range(8)]
    assert hosts_of(gpus) == [0] * 4 + [1] * 4
    assert hosts_of(chips) == [0] * 8


# --- which layouts a run may use on several hosts -------------------------------------------------

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
EVERYWHERE = {DP8: 0.4, DP4TP2: 0.3, DP2TP4: 0.2, TP8: 0.1}


def latency(step: dict[Split, float]) -> LatencyModel:
    return made_up_latency(step, dict.fromkeys(step, 0.0), reshard=0.1, migrate_per_token=1e-4)


def chain_of(*per_host: int) -> dict[Split, Layout]:
    config = replace(PRESETS["tiny"], num_heads=8, num_kv_heads=8)
    return layout_chain(factored_mesh(fake_devices(*per_host)), config)[0]


def test_layouts_inside_a_host_need_no_proof():
    chain = chain_of(8)
    assert within_hosts(chain, None) == (chain, [])


@pytest.mark.parametrize(
    "known, reason",
    [
        (None, "no profile has times of it"),
        (latency({DP8: 0.4, DP2TP4: 0.2}), "python -m pat_jax.profile measures it"),
        (latency(EVERYWHERE | {TP8: 0.3}), "no decode step of it is faster than one of dp2tp4"),
    ],
)
def test_what_is_not_shown_to_pay_is_left_out(known, reason):
    layouts, dropped = within_hosts(chain_of(4, 4), known)
    assert list(layouts) == [DP8, DP4TP2, DP2TP4]
    assert len(dropped) == 1 and dropped[0].startswith("layout dp1tp8: its TP crosses hosts")
    assert reason in dropped[0]


def test_what_was_measured_to_pay_stays_in_its_place():
    layouts, dropped = within_hosts(chain_of(4, 4), latency(EVERYWHERE))
    assert list(layouts) == list(SPLITS) and dropped == []


@pytest.mark.parametrize(
    "limit, kept",
    [
        (1000, [DP8, DP4TP2, DP2TP4]),  # 800 bytes of weights in DP8
        (500, [DP4TP2, DP2TP4]),
        (190, [TP8]),  # 200 in DP2TP4
    ],
)
def test_a_layout_across_hosts_is_used_where_only_it_has_room(limit, kept):
    config = parse([*TINY, "--devices", "8", "--run_dir", "unused"])
    memory = MemoryModel(
        limit=limit / USABLE,
        resident=0,
        weights={split: 800 // split.tp for split in SPLITS},
        page=dict.fromkeys(SPLITS, 0),
        pages=dict.fromkeys(SPLITS, 100),
        page_size=16,
        chunk=1,
        staging=0,
        ahead=8,
    )
    layouts, dropped = worth_planning(config.rollout, chain_of(4, 4), memory, None)
    assert list(layouts) == kept and len(dropped) == 4 - len(kept)


def test_a_run_on_two_hosts_says_what_it_leaves_out(monkeypatch):
    hosts = "pat_jax.layout.layout.hosts_of"
    monkeypatch.setattr(hosts, lambda devices: [device.id // 4 for device in devices])
    options = [*TINY, "--devices", "8", "--run_dir", "unused"]
    setup = build(parse(options), jax.devices())
    assert TP8 not in setup.layouts and DP2TP4 in setup.layouts
    assert any("dp1tp8: its TP crosses hosts" in reason for reason in setup.dropped)
    pinned = build(parse([*options, "--layout", "dp1tp8"]), jax.devices())
    assert list(pinned.layouts) == [TP8]
    assert pinned.scripted is None, "planned by cost, which keeps its replicas even"
