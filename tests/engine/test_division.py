"""In which order the axes of the devices come, and why a layout is refused."""

import itertools
import math
from dataclasses import replace

import jax
import pytest
from fakes import fake_devices
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.layout.chain import find_layout, layout_chain
from pat_jax.layout.division import degrees_of, prime_factors
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.config import ModelConfig
from pat_jax.planning.types import Split

CONFIG = ModelConfig("qwen2", 720, 16, 720, 1, 8, 8, 4, vocab_multiple=720)


def heads(num_heads: int, num_kv_heads: int, **more: int) -> ModelConfig:
    return replace(CONFIG, num_heads=num_heads, num_kv_heads=num_kv_heads, **more)


@given(
    st.sampled_from([(6,), (8,), (12,), (18,), (30,), (36,), (2, 2, 2), (6, 6), (12, 12, 12)]),
    st.sampled_from([1, 2, 3, 4, 6, 8, 10]),
    st.sampled_from([1, 2, 3, 5, 6, 7, 9]),
    st.sampled_from([12, 64, 96, 720]),
)
def test_no_order_has_more_layouts(per_host, kv_heads, queries, mlp_dim):
    config = heads(kv_heads * queries, kv_heads, mlp_dim=mlp_dim)
    chain, _ = layout_chain(factored_mesh(fake_devices(*per_host)), config)
    across, inside = prime_factors(len(per_host)), prime_factors(per_host[0])
    orders = [
        [*outer, *inner]
        for outer in itertools.permutations(across)
        for inner in itertools.permutations(inside)
    ]
    most = max(len(degrees_of(config, order[::-1])) for order in orders)
    shape = list(next(iter(chain.values())).mesh.devices.shape)
    assert len(chain) == most and shape in orders
    # What ascending axes give as many layouts of is as it has ever been.
    if len(degrees_of(config, [*across, *inside][::-1])) == most:
        assert shape == [*across, *inside]


@pytest.mark.parametrize("num_devices", [1, 2, 4, 6, 8])
def test_layouts_built_twice_have_the_same_mesh(num_devices):
    """However the devices are listed: every process has to have one order."""
    devices, config = jax.devices()[:num_devices], heads(20, 4)
    meshes = {
        layout.mesh
        for given_devices in (devices, devices[::-1])
        for layout in layout_chain(factored_mesh(given_devices), config)[0].values()
    }
    assert len(meshes) == 1
    assert math.prod(next(iter(meshes)).devices.shape) == num_devices


@pytest.mark.parametrize(
    "num_devices, config, name, reason",
    [
        (6, heads(56, 8, mlp_dim=64), "dp2tp3", "dp2tp3 needs num_heads / num_kv_heads = 7 divisible by 3"),
        (6, heads(48, 8, mlp_dim=64), "dp2tp3", "dp2tp3 needs mlp_dim = 64 divisible by 3"),
        (6, heads(24, 24), "dp3tp2", "tp takes whole axes of the devices, of 3, 2 in this order, .* 1, 3, 6;"),
        (6, heads(24, 24), "dp2tp4", "dp and tp whose product is the number of devices, 6; with this model 6"),
        (8, heads(24, 8), "dp2tp4x", "whose product is the number of devices, 8; .* dp2tp4, dp1tp8; "),
        (8, heads(12, 4, vocab_multiple=2, vocab_size=62), "dp2tp4", "padded vocab_size = 62 divisible by 4"),
    ],
)  # fmt: skip
def test_a_refused_layout_says_what_does_not_divide(num_devices, config, name, reason):
    mesh = factored_mesh(jax.devices()[:num_devices])
    chain, _ = layout_chain(mesh, config)
    with pytest.raises(UserError, match=f"option --layout is '{name}': .*{reason}.*choose one"):
        find_layout(chain, name, mesh, config)


def test_a_layout_of_another_order_is_found_where_it_has_more():
    mesh, config = factored_mesh(jax.devices()[:6]), heads(20, 4)
    chain, _ = layout_chain(mesh, config)
    assert find_layout(chain, "dp3tp2", mesh, config) is chain[Split(3, 2)]
