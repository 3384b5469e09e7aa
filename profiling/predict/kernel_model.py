"""Predicts kernel times from a few coefficients per chip: the shares of its peaks that it reaches.

    product      floor + (memory^p + compute^p)^(1/p): its bytes at a share of the memory
                 bandwidth, its operations at a share of the peak
    grouped      the same for the experts that have rows, each a product of its own in one kernel
    attention    the same for the KV cache, page by page; the floor grows until work is split
    elementwise  floor + bytes

`kernel_coefficients.yaml` holds the shares. They are fitted by benchmarks/fit_kernels.py of
commit 8add1fe to published measurements, if there are any. Other chips have the shares of a
related chip (`relative`), except for kinds of kernels with their own shares in the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pat_jax.common.chips import Chip
from pat_jax.profiling.predict.links import HostLinks, Sums, TorusLinks, links_of, shipped
from pat_jax.profiling.predict.targets import Target

Source = Literal["coefficients", "chip data", "profile"]
FILE = "kernel_coefficients.yaml"
BYTES = 2  # bytes of a bfloat16 number
HEAD_DIM = 128  # width of a head in every model whose attention was measured
PAGE = 128  # tokens: the least that a kernel reads of a sequence
SPLIT = 512  # tokens: from here on several blocks read a sequence
RELATIVE = "relative"  # names the chip whose shares stand for missing ones


def _shares(name: str) -> dict[str, Any]:
    """Returns a chip's coefficients by kernel: shares of its peaks, microseconds, exponents."""
    own = dict(shipped(FILE)["chips"][name])
    relative = own.pop(RELATIVE, None)
    return (_shares(relative) if relative else {}) | own


@dataclass(frozen=True)
class ModelledKernels:
    """Predicts kernel times on a target's devices, from coefficients.

    Methods return milliseconds of one layer on one device, in a CUDA graph or a TPU program.
    """

    target: Target
    weight_bytes: float = BYTES  # of one number of a weight matrix: 1 if it is kept in int8
    sums: Sums = "one-shot"
    kv_bytes: float = BYTES  # of one number of the KV cache

    @property
    def chip(self) -> Chip:
        return self.target.chip

    @property
    def source(self) -> Source:
        """Where the times are from; every figure that depends on them names it."""
        return "chip data" if RELATIVE in shipped(FILE)["chips"][self.chip.name] else "coefficients"

    @cached_property
    def own(self) -> Mapping[str, Mapping[str, float]]:
        """Coefficients of this engine's kernels on the chip or its relative, if measured."""
        return _shares(self.chip.name).get("own", {})

    @cached_property
    def shares(self) -> Mapping[str, Mapping[str, float]]:
        return {**_shares(self.chip.name), **self.own}

    @cached_property
    def links(self) -> HostLinks | TorusLinks:
        return links_of(self.target, self.sums)

    def gemm(self, m: int, n: int, k: int) -> float:
        """Returns the milliseconds of a matrix product, [m, k] times [k, n]."""
        return self._product("gemm", (m, n, k), 1, self.weight_bytes)

    def head(self, m: int, n: int, k: int) -> float:
        """Returns the milliseconds of a product of the output head, whose weights are never
        quantized."""
        return self._product("gemm", (m, n, k), 1, max(self.weight_bytes, BYTES))

    def grouped(self, rows: float, active: float, n: int, k: int) -> float:
        """Returns the milliseconds of one kernel with products of `rows` rows of k numbers with the
        [k, n] of their experts. It reads the weights of the `active` experts only: those that have
        rows."""
        return self._product("grouped", (rows, n, k), active, self.weight_bytes)

    def _product(
        self, kind: str, sizes: tuple[float, int, int], matrices: float, weight_bytes: float
    ) -> float:
        m, n, k = sizes
        share = self.shares[kind]
        num_bytes = weight_bytes * matrices * n * k + BYTES * m * k + BYTES * m * n
        memory = num_bytes / (share["memory"] * self.chip.memory_bytes_s)
        compute = 2 * m * n * k / (share["compute"] * self.chip.flops_s)
        return 1e-3 * share["floor_us"] + 1e3 * _norm(memory, compute, share["sharpness"])

    def decode_attention(self, rows: int, length: int, heads: int, kv_heads: int) -> float:
        """Returns the milliseconds of attention of `rows` sequences of `length` tokens."""
        del heads  # queries are few: what counts is the cache that is read
        share = self.shares["decode_attention"]
        num_bytes = 2 * self.kv_bytes * HEAD_DIM * rows * kv_heads * max(length, PAGE)
        read = num_bytes / (share["memory"] * self.chip.memory_bytes_s)
        read += 1e-6 * rows * (share["row_us"] + kv_heads * share["head_us"])
        floor = share["floor_us"] + share["split_us"] * min(1.0, length / SPLIT)
        return 1e3 * _norm(1e-6 * floor, read, share["sharpness"])

    def prefill_attention(self, rows: int, length: int, heads: int, kv_heads: int) -> float:
        """Returns the milliseconds of causal attention of `rows` prompts of `length` tokens
        each."""
        del kv_heads
        share = self.shares["prefill_attention"]
        operations = 2 * HEAD_DIM * rows * heads * length**2
        per_token = 1e-9 * share["token_ns"] * rows * heads * length
        compute = operations / (share["compute"] * self.chip.flops_s)
        return 1e-3 * share["floor_us"] + 1e3 * (compute + per_token)

    def elementwise(self, num_bytes: float) -> float:
        """Returns the milliseconds of one fused kernel, such as a norm, that reads and writes
        `num_bytes`."""
        share = self.shares["elementwise"]
        seconds = num_bytes / (share["memory"] * self.chip.memory_bytes_s)
        return 1e-3 * share["floor_us"] + 1e3 * seconds

    def all_reduce(self, devices: int, elements: int) -> float:
        """Returns the milliseconds of a sum of bfloat16 numbers over the devices of a replica."""
        return 1e3 * self.links.all_reduce_s(devices, BYTES * elements)

    def all_gather(self, devices: int, elements: int) -> float:
        """Returns the milliseconds of a gather of `elements` bfloat16 numbers in total, of which
        each device has a share."""
        return 1e3 * self.links.all_gather_s(devices, BYTES * elements)

    def exchange_bytes_s(self, devices: int) -> float:
        """Returns the bytes a second, one way, from each of `devices` devices to the others."""
        return self.links.exchange_bytes_s(devices)


def _norm(a: float, b: float, sharpness: float) -> float:
    """Returns the p-norm: near the larger number, and above it if both are alike and p small."""
    return (a**sharpness + b**sharpness) ** (1 / sharpness)


EXPLAINED: dict[Source, str] = {
    "coefficients": "coefficients fitted to kernels measured on this chip",
    "chip data": "its maker's rates, and shares of them that a related chip was measured to reach",
    "profile": "a profile measured on this machine",
}
RANGES = Path(__file__).parent / "step_ranges.yaml"


@dataclass(frozen=True)
class StepRange:
    """The range of measured step times, as multiples of their predictions."""

    low: float
    high: float
    rows: int = 0  # measured steps; 0: those of this machine's profile
    own: int = 0  # how many of these are of this engine


FEWEST = 10  # measured steps; a range of fewer says nothing
OF_PROFILE = StepRange(0.98, 1.02)  # between the points of a profile


def precision_of(weight_bytes: float) -> str:
    """Returns the precision of weights, as `step_ranges.yaml` names it."""
    return "bfloat16" if weight_bytes >= BYTES else "eight bits"


def range_of(chip: Chip, source: Source, weight_bytes: float = BYTES) -> StepRange | None:
    """Returns the range of step times on a chip, for weights of `weight_bytes` each. None if fewer
    than `FEWEST` steps were measured with such weights on its platform, or none on such a chip."""
    if source == "profile":
        return OF_PROFILE
    platform = shipped(RANGES.name).get(chip.platform, {})
    found = platform.get(precision_of(weight_bytes), {})
    is_known = chip.name in platform.get("chips", ()) and source in found
    if not is_known or found["rows"] < FEWEST:
        return None
    low, high = found[source]
    return StepRange(low, high, found["rows"], found["own"])
