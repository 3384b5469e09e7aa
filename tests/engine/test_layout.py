"""Which mesh axes a layout takes, how KV heads fall on them, and which layouts there are."""

import re
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from fakes import SPLITS, FakeDevice, fake_devices
from jax.sharding import PartitionSpec

from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh, hosts_of
from pat_jax.layout.rules import RULES
from pat_jax.models.config import ExpertsConfig, ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import PRESETS
from pat_jax.planning.types import Split

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
                for spec in jax.tree.leaves(layout.param_specs(policy, role)):
                    used = [axis for part in spec if part for axis in part]
                    assert len(used) == len(set(used))


def test_the_trainer_splits_the_embedding_over_dp_and_the_rollout_does_not():
    layout = layouts()[Split(4, 2)]
    assert layout.mesh_axes("embed", "train") == layout.dp_axes
    assert layout.mesh_axes("embed") == ()
    odd = layouts(embed_dim=18)[Split(4, 2)]
    assert odd.size(odd.mesh_axes("embed", "train")) == 2  # 18 = 2 · 9


def test_two_axes_of_one_array_do_not_share_a_mesh_axis():
    layout = layouts()[Split(4, 2)]
    with pytest.raises(ValueError, match=r"^layout dp4tp2 splits 'vocab' and 'mlp' .* axis2; give"):
        layout.spec("vocab", "mlp", "embed")
    with pytest.raises(ValueError, match="'batch' and 'embed'"):
        layout.spec("batch", "embed", role="train")
    layout.spec("batch", "embed")  # the rollout does not split the embedding
    layouts()[Split(8, 1)].spec("vocab", "mlp")  # TP of one splits nothing


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
