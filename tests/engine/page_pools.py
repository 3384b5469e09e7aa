"""Pools of pages made in NumPy, put onto the shards of any layout, moved and looked at there."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.engine.device.pages.pages import Exchange, pack, shift, unpack
from pat_jax.engine.sequences.state import LayerPages
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.cache.paged_layer import KV_AXES
from pat_jax.models.config import ModelConfig
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key

CONFIG = ModelConfig("llama", 61, 48, 48, 1, 24, 6, 2, vocab_multiple=24)
# Devices, KV heads, query heads: copies of KV heads from TP 1, 2, 4 or never; factors 2 · 3, too.
CASES = [(8, 8, 8), (8, 6, 24), (8, 3, 24), (8, 1, 8), (8, 2, 8), (6, 3, 6), (6, 2, 12)]
PAGE_SIZE = 2  # tokens


class Programs(dict):
    """Those that move pages between some layouts; compiles what is asked for."""

    def __init__(self, *layouts: Layout):
        super().__init__()
        self.layouts = {layout.split: layout for layout in layouts}

    def __missing__(self, key: Key):
        layout, target = (self.layouts[split] for split in (key.split, key.target or key.split))
        run = {
            "pack": lambda: pack(layout, target),
            "unpack": lambda: unpack(layout),
            "shift": lambda: shift(layout),
            "exchange": lambda: Exchange.between(layout, target).all(),
            "exchange_one": lambda: Exchange.between(layout, target).one(),
        }[key.name]()
        self[key] = jax.jit(run, donate_argnums=0 if key.name == "unpack" else ())
        return self[key]


@cache
def chain(num_devices: int, kv_heads: int, num_heads: int) -> dict[Split, Layout]:
    config = replace(CONFIG, num_kv_heads=kv_heads, num_heads=num_heads)
    layouts, dropped = layout_chain(factored_mesh(jax.devices()[:num_devices]), config)
    assert not dropped and len(layouts) == (4 if num_devices == 8 else 3)
    return layouts


def put(x: np.ndarray, layout: Layout):
    """A pool of one layer, keys and values told apart."""
    sharding = layout.sharding(*KV_AXES)
    return (LayerPages(*(jax.device_put(jnp.asarray(y), sharding) for y in (x, -x))),)


def assert_pages_arrived(found, pages: np.ndarray, expected: np.ndarray, target: Layout) -> None:
    """On every device that holds a copy of some of `pages`, numbered over all replicas."""
    is_due = np.zeros(len(found[0].keys), bool)
    is_due[pages] = True
    for array, reference in zip(found[0], put(expected, target)[0], strict=True):
        for shard, other in zip(
            array.addressable_shards, reference.addressable_shards, strict=True
        ):
            assert (shard.device, shard.index) == (other.device, other.index)
            due = is_due[shard.index[0]]
            np.testing.assert_array_equal(np.asarray(shard.data)[due], np.asarray(other.data)[due])
