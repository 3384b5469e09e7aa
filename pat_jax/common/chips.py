"""The data sheets of accelerators, read from `chips.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import yaml


@dataclass(frozen=True)
class Chip:
    """One device, as its maker describes it."""

    name: str
    platform: Literal["cuda", "tpu"]
    memory_bytes: int
    memory_bytes_s: float  # bytes a second that the device reads from its memory
    flops_s: float  # peak operations a second in bfloat16, without sparsity
    link: str  # name of the links between devices of a host, or of a TPU slice
    links: int  # number of such links of a device
    link_bytes_s: float  # bytes a second one way, over all links of a device together
    host_link_bytes_s: float  # bytes a second one way: a device's share of its host's network
    pcie_bytes_s: float  # bytes a second one way, between a device and its host's memory
    largest_host: int = 0  # most devices of a host, or 0 for no limit
    dimensions: int = 0  # number of dimensions of a TPU's torus
    description: str = ""  # of a GPU, for XLA's compiler: a GpuTargetConfig in text form
    device_kinds: tuple[str, ...] = ()  # its names in JAX (`jax.Device.device_kind`)


@lru_cache(maxsize=1)
def chips() -> Mapping[str, Chip]:
    """Returns every known accelerator, by name."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    kinds = {name: tuple(row.pop("device_kinds")) for name, row in rows.items()}
    return {name: Chip(name, **row, device_kinds=kinds[name]) for name, row in rows.items()}


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip with this name in JAX, or None if it is not known here."""
    return next((chip for chip in chips().values() if device_kind in chip.device_kinds), None)
