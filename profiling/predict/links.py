"""Predicts the seconds of all-reduces and all-gathers over the links of a machine.

Inside a host of GPUs an all-reduce is done by NCCL, or by the custom kernels of serving engines.
These are one-shot (every device reads everything) or two-shot (every device sums a share),
whichever is faster. Over PCIe and between hosts it goes around a ring. On a TPU it goes along the
axes of the torus.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from pat_jax.common.chips import Chip
from pat_jax.layout.division import prime_factors
from pat_jax.profiling.predict.targets import Target

# How GPUs of one host sum; "ungraphed": by NCCL outside of a CUDA graph.
Sums = Literal["one-shot", "nccl", "ungraphed"]


@cache
def shipped(name: str) -> dict[str, Any]:
    """Reads a YAML file of numbers in this folder."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def coefficients() -> dict[str, dict[str, float]]:
    return shipped("link_coefficients.yaml")


def links_of(target: Target, sums: Sums = "one-shot") -> "HostLinks | TorusLinks":
    if target.chip.platform == "tpu":
        return TorusLinks(target.chip, target.topology)
    return HostLinks(target.chip, target.devices_per_host, sums)


def launch_s(sums: Sums) -> float:
    """Returns the seconds to launch a collective: 0 unless it is outside of a CUDA graph."""
    return 1e-6 * coefficients()["ungraphed"]["launch_us"] if sums == "ungraphed" else 0.0


def waiting_s(chip: Chip, devices: int) -> float:
    """Returns the seconds that `devices` devices wait for each other at a collective, or 0 for
    TPUs."""
    if chip.platform == "tpu":
        return 0.0
    return 1e-6 * coefficients()["waiting"]["each_us"] * (devices - 1)


def added(chip: Chip, sums: float, products: float) -> float:
    """Returns the time that a layer's collectives add to that of its products: `sums` and
    `products` are the times of both alone, in any unit. A TPU's program fetches the next weights
    from memory while devices sum: together the two take about the root of the sum of their squares.
    On a GPU one waits for the other."""
    if chip.platform != "tpu":
        return sums
    sharpness = coefficients()["ici"]["beside"]
    return (products**sharpness + sums**sharpness) ** (1 / sharpness) - products


@dataclass(frozen=True)
class HostLinks:
    """GPUs: fast links inside a host, a network between hosts."""

    chip: Chip
    devices_per_host: int
    sums: Sums = "one-shot"

    @property
    def _has_nvlink(self) -> bool:
        return self.chip.link.startswith("NVLink")

    def all_reduce_s(self, devices: int, num_bytes: float, hosts: int = 1) -> float:
        """Returns the seconds of an all-reduce of `num_bytes` on each device. The devices are on
        `hosts` hosts; 1 means on as few hosts as have room for them."""
        return self._passes_s(devices, num_bytes, 2, hosts)

    def all_gather_s(self, devices: int, num_bytes: float, hosts: int = 1) -> float:
        """Returns the seconds of an all-gather of `num_bytes` in total; see `all_reduce_s`."""
        return self._passes_s(devices, num_bytes, 1, hosts)

    def _passes_s(self, devices: int, num_bytes: float, passes: int, hosts: int) -> float:
        inside = min(devices // hosts, self.devices_per_host)
        hosts = devices // inside
        seconds = 0.0
        if inside > 1:
            seconds = self._nccl(inside, num_bytes, passes)
        if inside > 1 and passes == 2:
            seconds += launch_s(self.sums)
            if self.sums == "one-shot" and self._has_nvlink:
                seconds = min(seconds, self._custom(inside, num_bytes))
        if hosts > 1:
            # Each device sums its share with its peers in other hosts, before shares are gathered.
            seconds += self._ring(hosts, num_bytes / inside, "network", passes)
        return seconds

    def exchange_bytes_s(self, devices: int) -> float:
        """Returns the bytes a second, one way, that each of `devices` devices sends to the
        others."""
        fits = devices <= self.devices_per_host
        return self.chip.link_bytes_s if fits else self.chip.host_link_bytes_s

    def _custom(self, devices: int, num_bytes: float) -> float:
        known = coefficients()["custom"]
        others = devices - 1
        rate = 1e6 / self.chip.link_bytes_s
        one = known["one_us"] + known["one_each_us"] * others
        one += num_bytes * others * rate / known["one_link"]
        two = known["two_us"] + known["two_each_us"] * others
        two += 2 * num_bytes * others / devices * rate / known["two_link"]
        return 1e-6 * min(one, two)

    def _nccl(self, devices: int, num_bytes: float, passes: int) -> float:
        """Returns the seconds of an all-gather (one pass) or an all-reduce (two)."""
        if not self._has_nvlink:
            return self._ring(devices, num_bytes, "pcie", passes)
        known = coefficients()[("nccl_gather", "nccl_sum")[passes - 1]]
        others = devices - 1
        sent = passes * num_bytes * others / devices
        seconds = 1e-6 * (known["floor_us"] + known["each_us"] * others)
        # Middle sizes are sent in chunks, neither at the latency nor at the rate of the link.
        seconds += 1e-6 * known["root_us"] * math.sqrt(num_bytes / 1e6)
        return seconds + sent / (known["link"] * self.chip.link_bytes_s)

    def _ring(self, members: int, num_bytes: float, name: str, passes: int) -> float:
        known = coefficients()[name]
        rate = self.chip.link_bytes_s if name == "pcie" else self.chip.host_link_bytes_s
        steps = passes * (members - 1)
        return steps * (1e-6 * known["step_us"] + num_bytes / members / (known["link"] * rate))


@dataclass(frozen=True)
class TorusLinks:
    """TPUs: devices that sum are a compact block of the torus, and use all its axes at once.

    An axis of `n` devices is a ring if the slice has links from its ends to its beginnings, else a
    line. Rates and hop times: "How to Scale Your Model" (Austin et al. 2025), chapter 3.
    """

    chip: Chip
    topology: tuple[int, ...]

    def all_reduce_s(self, devices: int, num_bytes: float, hosts: int = 1) -> float:
        return 2 * self._pass_s(devices, num_bytes) if devices > 1 else 0.0

    def all_gather_s(self, devices: int, num_bytes: float, hosts: int = 1) -> float:
        return self._pass_s(devices, num_bytes) if devices > 1 else 0.0

    def exchange_bytes_s(self, devices: int) -> float:
        axes = len([size for size in self.block(devices) if size > 1])
        return max(1, axes) * self._one_link

    def block(self, devices: int) -> tuple[int, ...]:
        """Returns the shape of `devices` devices: as near to a cube as the slice allows."""
        extents = [1] * len(self.topology)
        for factor in prime_factors(devices):
            fits = [i for i, n in enumerate(self.topology) if n % (extents[i] * factor) == 0]
            axis = min(fits, key=lambda i: (extents[i], self.topology[i]))
            extents[axis] *= factor
        return tuple(extents)

    @property
    def _one_link(self) -> float:
        return self.chip.link_bytes_s / self.chip.links

    def _is_ring(self, axis: int, size: int) -> bool:
        """Returns whether an axis is a ring: on v5p a multiple of 4, on v5e and v6e that of a whole
        pod."""
        whole = size == self.topology[axis]
        return whole and (size % 4 == 0 if self.chip.dimensions == 3 else size == 16)

    def _pass_s(self, devices: int, num_bytes: float) -> float:
        """Returns the seconds of an all-gather; a reduce-scatter takes as long."""
        known = coefficients()["ici"]
        axes = [(i, size) for i, size in enumerate(self.block(devices)) if size > 1]
        rings = [self._is_ring(axis, size) for axis, size in axes]
        both = zip(axes, rings, strict=True)
        hops = sum(size // 2 if ring else size - 1 for (_, size), ring in both)
        # A share of the data goes along each axis first; a ring sends both ways, a line must carry
        # everything past its middle.
        rate = known["link"] * self._one_link * (len(rings) + sum(rings))
        sent = num_bytes * (devices - 1) / devices
        return 1e-6 * (known["floor_us"] + known["hop_us"] * hops) + sent / rate
