"""Reads and interpolates published kernel measurements of one GPU. Milliseconds.

Between measured sizes times are linear; past the last size they go on with the slope of the last
two.
"""

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.links import Sums, launch_s
from pat_jax.profiling.predict.targets import Target


class Interpolated:
    """Milliseconds over one size."""

    def __init__(self, points: dict[int, float]):
        self.sizes = np.array(sorted(points), float)
        self.ms = np.array([points[int(size)] for size in self.sizes])

    @classmethod
    def rising(cls, points: dict[int, float]) -> "Interpolated":
        """Interpolates points made ascending: less work is never slower, as it could be padded."""
        sizes = sorted(points)
        ms = np.minimum.accumulate([points[size] for size in reversed(sizes)])[::-1]
        return cls(dict(zip(sizes, ms.tolist(), strict=True)))

    def __call__(self, size: float) -> float:
        if size <= self.sizes[-1] or len(self.sizes) == 1:
            return float(np.interp(size, self.sizes, self.ms))
        (x0, x1), (y0, y1) = self.sizes[-2:], self.ms[-2:]
        return float(y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (size - x1))


class Attention:
    """Milliseconds of one layer's attention, by KV heads, heads, and the sizes in two columns,
    `outer` and `inner`."""

    def __init__(self, rows: Iterable[dict[str, str]], outer: str, inner: str):
        self.table: dict = defaultdict(dict)
        for row in rows:
            heads = int(row["num_key_value_heads"]), int(row["num_heads"])
            self.table[(*heads, int(row[outer]))][int(row[inner])] = float(row["latency_ms"])
        self.kv_heads = {kv for kv, _, _ in self.table}
        self.most = max(size for _, _, size in self.table)  # of the outer sizes

    def ms(self, kv_heads: int, heads: int, outer: int, inner: int) -> float:
        along_heads = {}
        for h in _around(sorted({h for kv, h, _ in self.table if kv == kv_heads}), heads):
            sizes = sorted(n for kv, head, n in self.table if (kv, head) == (kv_heads, h))
            around = _around(sizes, outer)
            along = {n: Interpolated(self.table[kv_heads, h, n])(inner) for n in around}
            along_heads[h] = Interpolated(along)(outer)
        return Interpolated(along_heads)(heads)


class KernelTables(ModelledKernels):
    """Measured kernels of one kind of GPU; kernels without a table are modelled."""

    def __init__(self, data: Path, target: Target, sums: Sums = "one-shot"):
        super().__init__(target, sums=sums)
        self.folder = data / "calibration"

    def _rows(self, name: str) -> Iterator[dict[str, str]]:
        (path,) = self.folder.glob(f"aiconfigurator/{self.chip.name}_*_{name}")
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from csv.DictReader(file)

    @cached_property
    def _gemms(self) -> dict[tuple[int, int], Interpolated]:
        table: dict = defaultdict(dict)
        for row in self._rows("gemm_bf16.csv.gz"):
            table[int(row["n"]), int(row["k"])][int(row["m"])] = float(row["latency_ms"])
        return {sizes: Interpolated.rising(over_m) for sizes, over_m in table.items()}

    @cached_property
    def _gemm_sizes(self) -> list[int]:
        return sorted({n for n, _ in self._gemms})

    def gemm(self, m: int, n: int, k: int) -> float:
        along_n = {}
        for n_at in _around(self._gemm_sizes, n):
            along_k = {
                k_at: self._gemms[n_at, k_at](m)
                for k_at in _around(self._gemm_sizes, k)
                if (n_at, k_at) in self._gemms
            }
            along_n[n_at] = Interpolated(along_k)(k)
        return Interpolated(along_n)(n)

    def head(self, m: int, n: int, k: int) -> float:
        return self.gemm(m, n, k)

    @cached_property
    def _decode_attention(self) -> Attention:
        return Attention(self._rows("decode_attention_bf16.csv"), "batch_size", "step")

    def decode_attention(self, rows: int, length: int, heads: int, kv_heads: int) -> float:
        table = self._decode_attention
        if self.own or kv_heads not in table.kv_heads:
            return super().decode_attention(rows, length, heads, kv_heads)
        return table.ms(kv_heads, heads, rows, length - 1)  # "step" counts the tokens before it

    @cached_property
    def _prefill_attention(self) -> Attention:
        return Attention(self._rows("prefill_attention_bf16.csv"), "isl", "batch_size")

    def prefill_attention(self, rows: int, length: int, heads: int, kv_heads: int) -> float:
        table = self._prefill_attention
        if kv_heads not in table.kv_heads:
            return super().prefill_attention(rows, length, heads, kv_heads)
        longest = min(length, table.most)
        return table.ms(kv_heads, heads, longest, rows) * (length / longest) ** 2

    @cached_property
    def _all_reduces(self) -> dict[int, Interpolated]:
        if self.sums != "one-shot":
            return self._nccl("all_reduce")
        rows = self._rows("custom_allreduce.csv")
        return _by_gpus(row for row in rows if row["backend"] == "sglang_graph")

    @cached_property
    def _all_gathers(self) -> dict[int, Interpolated]:
        return self._nccl("all_gather")

    def _nccl(self, kind: str) -> dict[int, Interpolated]:
        return _by_gpus(row for row in self._rows("nccl*.csv") if row["op_name"] == kind)

    def all_reduce(self, devices: int, elements: int) -> float:
        if devices in self._all_reduces:
            return 1e3 * launch_s(self.sums) + self._all_reduces[devices](elements)
        return super().all_reduce(devices, elements)

    def all_gather(self, devices: int, elements: int) -> float:
        if devices in self._all_gathers:
            return self._all_gathers[devices](elements)
        return super().all_gather(devices, elements)


def _by_gpus(rows: Iterable[dict[str, str]]) -> dict[int, Interpolated]:
    """Milliseconds of a collective by number of devices, over elements of two bytes."""
    points: dict = defaultdict(dict)
    for row in rows:
        elements = row.get("message_elems_bf16") or row["message_elems_fp16"]
        points[int(row["num_gpus"])][int(elements)] = float(row["latency_ms"])
    return {gpus: Interpolated(line) for gpus, line in points.items()}


def _around(sizes: Sequence[int], size: int) -> list[int]:
    """The two measured sizes for the line through `size`; `size` alone if it was measured."""
    if size in sizes:
        return [size]
    for low, high in pairwise(sizes):
        if low < size < high:
            return [low, high]
    return list(sizes[:1] if size < sizes[0] else sizes[-2:])
