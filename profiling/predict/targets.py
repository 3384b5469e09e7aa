"""Machines that need not be here: which accelerators, how many, and their maker's data.

Knows how a target is written. Does not know how anything is compiled for a target, nor how fast
anything is.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from pat_jax.common.chips import Chip, chip_of, chips
from pat_jax.common.errors import UserError, shown

if TYPE_CHECKING:
    from pat_jax.common.devices import Device

MOST_DEVICES = 1024
EXAMPLES = "h100:8 (eight of one host), h100:8x4 (eight on each of four hosts), v5e:2x4, v5p:2x2x2"


@dataclass(frozen=True)
class Target:
    """A number of equal devices, and how they are connected."""

    text: str  # as it was written: "h100:8x4" or, with its network's Gb/s, "h100:8x4@400"
    chip: Chip
    topology: tuple[int, ...]  # shape of a TPU slice; for GPUs (hosts, devices of a host)
    devices_per_host: int  # joined by fast links; on TPUs the whole slice
    num_hosts: int

    @property
    def num_devices(self) -> int:
        return self.devices_per_host * self.num_hosts

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, devices: "Sequence[Device]") -> "Target | None":
        """Returns the target that names these devices, or None if their chip is unknown, or if they
        are neither as many on every host nor a whole TPU slice."""
        from pat_jax.layout.mesh import hosts_of  # JAX, which options are read before

        chip = chip_of(devices[0].device_kind)
        if chip is None:
            return None
        if chip.platform == "tpu":
            corners = zip(*(device.coords for device in devices), strict=True)
            sides = [max(x) - min(x) + 1 for x in corners]
            shape = sorted(side for side in sides if side > 1)
            shape = [1] * (chip.dimensions - len(shape)) + shape
            is_whole = len(shape) == chip.dimensions and math.prod(shape) == len(devices)
            return cls.parse(f"{chip.name}:{'x'.join(map(str, shape))}") if is_whole else None
        per_host, *others = Counter(hosts_of(devices)).values()
        if any(count != per_host for count in others) or per_host > chip.largest_host:
            return None
        hosts = f"x{1 + len(others)}" if others else ""
        return cls.parse(f"{chip.name}:{per_host}{hosts}")

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Returns the target that `text` names, such as h100:8x4, h100:8x4@400 or v5e:2x4. Raises
        UserError if no such chip is known, or if it does not come in that number or shape."""
        devices, has_network, network = (plain := text.strip().lower()).partition("@")
        name, _, shape = devices.partition(":")
        if slice_ := re.fullmatch(r"(v5litepod|v\w+)-(\d{1,6})", devices):  # as Google names it
            name = {"v5litepod": "v5e"}.get(slice_[1], slice_[1])
            shape = f"{int(slice_[2]) // (2 if name == 'v5p' else 1)}"  # v5p: cores, two of a chip
        known = chips()
        if name not in known:
            raise UserError(
                f"target {shown(text)}: {name!r} is no accelerator known here, expected one of "
                f"{', '.join(known)}; write {EXAMPLES}."
            )
        chip = known[name]
        sizes = _sizes(text, shape)
        found = _slice(text, chip, sizes) if chip.platform == "tpu" else _hosts(plain, chip, sizes)
        return _with_network(text, found, network) if has_network else found


@dataclass(frozen=True)
class PaperDevice:
    """A stand-in for a device, with the attributes that a mesh reads."""

    id: int
    process_index: int  # index of the host
    platform: str = "gpu"  # no torus: only numbers of devices count here
    device_kind: str = "on paper"


def paper_devices(target: Target) -> "list[Device]":
    """Returns stand-ins for the devices of `target`, on as many hosts."""
    every = range(target.num_devices)
    return [cast("Device", PaperDevice(i, i // target.devices_per_host)) for i in every]


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


def _with_network(text: str, target: Target, network: str) -> Target:
    """Returns the target with a network of so many Gb/s for each host, one way."""
    if target.num_hosts == 1 or not re.fullmatch(r"[1-9]\d{0,5}", network):
        raise UserError(
            f"target {shown(text)}: expected the Gb/s of each host's network behind the @, and "
            f"several hosts of GPUs; write h100:8x4@400."
        )
    rate = 1e9 / 8 * int(network) / target.devices_per_host
    return replace(target, chip=replace(target.chip, host_link_bytes_s=rate))


def _slice(text: str, chip: Chip, sizes: tuple[int, ...]) -> Target:
    if len(sizes) == 1 and sizes[0].bit_count() == 1:  # the number of chips: nearly equal sides
        exponent = sizes[0].bit_length() - 1
        sizes = tuple(1 << (exponent + i) // chip.dimensions for i in range(chip.dimensions))
    if len(sizes) != chip.dimensions:
        example = "x".join("2" * (chip.dimensions - 1) + "4")
        raise UserError(
            f"target {shown(text)}: expected the {chip.dimensions} dimensions of a {chip.name} slice, such "
            f"as {chip.name}:{example}."
        )
    written = f"{chip.name}:{'x'.join(map(str, sizes))}"
    return Target(written, chip, sizes, math.prod(sizes), 1)


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
