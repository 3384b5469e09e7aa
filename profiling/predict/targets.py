"""Machines that need not be there: which accelerators, how many, and what their maker says of one.

Knows chips as data (`targets.yaml`) and how a target is written. Does not know how anything is compiled
for one, nor how fast anything is.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import yaml

from pat_jax.common.errors import UserError, shown

if TYPE_CHECKING:
    from pat_jax.common.devices import Device

MOST_DEVICES = 1024
EXAMPLES = "h100:8 (eight of one host), h100:8x4 (eight on each of four hosts), v5e:2x4, v5p:2x2x2"


@dataclass(frozen=True)
class Chip:
    """One device, as its maker describes it."""

    name: str
    platform: Literal["cuda", "tpu"]
    memory_bytes: int
    memory_bytes_s: float
    flops_s: float  # bfloat16, no sparsity
    link: str  # between devices of a host, or of a TPU slice
    links: int  # of a device
    link_bytes_s: float  # one way, all links of a device together
    host_link_bytes_s: float  # one way, a device's share of its host's network
    pcie_bytes_s: float  # one way, between a device and its host's memory
    largest_host: int = 0  # devices; 0: no limit
    dimensions: int = 0  # of a TPU's torus
    description: str = ""  # a GPU, for XLA's compiler: a GpuTargetConfig in text form
    device_kinds: tuple[str, ...] = ()  # what JAX calls it


@dataclass(frozen=True)
class Target:
    """A number of equal devices, and how they are joined."""

    text: str  # as it was written: "h100:8x4"
    chip: Chip
    topology: tuple[int, ...]  # of a TPU slice; (hosts, devices of a host) of GPUs
    devices_per_host: int  # that the fast links join: all of a TPU slice
    num_hosts: int

    @property
    def num_devices(self) -> int:
        return self.devices_per_host * self.num_hosts

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "Target":
        """The target that `text` names, such as h100:8x4 or v5e:2x4.

        Raises:
          UserError: no such chip is known, or it does not come in that number or shape.
        """
        name, _, shape = (plain := text.strip().lower()).partition(":")
        known = chips()
        if name not in known:
            raise UserError(
                f"target {shown(text)}: {name!r} is no accelerator known here, expected one of "
                f"{', '.join(known)}; write {EXAMPLES}."
            )
        chip, sizes = known[name], _sizes(text, shape)
        return _slice(plain, chip, sizes) if chip.platform == "tpu" else _hosts(plain, chip, sizes)


@dataclass(frozen=True)
class PaperDevice:
    """What a mesh asks of a device."""

    id: int
    process_index: int  # the host
    platform: str = "gpu"  # no torus: only numbers of devices count here
    device_kind: str = "on paper"


def paper_devices(target: Target) -> "list[Device]":
    """As many as a target has, and on as many hosts."""
    every = range(target.num_devices)
    return [cast("Device", PaperDevice(i, i // target.devices_per_host)) for i in every]


@lru_cache(maxsize=1)
def chips() -> Mapping[str, Chip]:
    """Every accelerator known here, by name."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    kinds = {name: tuple(row.pop("device_kinds")) for name, row in rows.items()}
    return {name: Chip(name, **row, device_kinds=kinds[name]) for name, row in rows.items()}


def chip_of(device_kind: str) -> Chip | None:
    """The one that JAX calls so; None: it is not known here."""
    return next((chip for chip in chips().values() if device_kind in chip.device_kinds), None)


def _sizes(text: str, shape: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d{0,8}(x[1-9]\d{0,8}){0,3}", shape):
        raise UserError(
            f"target {shown(text)}: expected the number of devices behind the colon; write {EXAMPLES}."
        )
    sizes = tuple(int(size) for size in shape.split("x"))
    if math.prod(sizes) > MOST_DEVICES:
        raise UserError(
            f"target {shown(text)}: {math.prod(sizes):,} devices, expected at most {MOST_DEVICES:,}."
        )
    return sizes


def _slice(text: str, chip: Chip, sizes: tuple[int, ...]) -> Target:
    if len(sizes) != chip.dimensions:
        example = "x".join("2" * (chip.dimensions - 1) + "4")
        raise UserError(
            f"target {shown(text)}: expected the {chip.dimensions} dimensions of a {chip.name} slice, such "
            f"as {chip.name}:{example}."
        )
    return Target(text, chip, sizes, math.prod(sizes), 1)


def _hosts(text: str, chip: Chip, sizes: tuple[int, ...]) -> Target:
    if len(sizes) > 2:
        raise UserError(
            f"target {shown(text)}: expected devices of a host and, behind an x, hosts, such as "
            f"{chip.name}:8 or {chip.name}:8x4."
        )
    devices, hosts = (*sizes, 1)[:2]
    if devices > chip.largest_host:
        raise UserError(
            f"target {shown(text)}: a host has at most {chip.largest_host} {chip.name} joined by "
            f"{chip.link}; write {chip.name}:8x{-(-devices // 8)} for several hosts."
        )
    return Target(text, chip, (hosts, devices), devices, hosts)
