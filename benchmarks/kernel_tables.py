"""Latency models of machines that are not here, composed from published kernel measurements.

    python -m benchmarks.kernel_tables --data ../shared/data

Measured, on the GPU named (aiconfigurator@095f58a5: SGLang 0.5.10, bf16): every GEMM, decode and
prefill attention of one layer, the all-reduce inside a CUDA graph. Between measured points times are
interpolated in a straight line; past the last one they go on with the slope of the last two.

Computed: a decode step is the sum of its kernels over all layers and the lm head; re-slicing reads
and writes the new shards at HBM bandwidth (going down: gathers them over NVLink); migrating sends
what a device gives away at one-way NVLink bandwidth; recomputing is a prefill.

Assumed: 0.02 ms a row of host and sampling time in each step (what the kernels lack against measured
end-to-end rows, Llama-3.1-8B on H100), and `SWITCH_S` of host and launch time a switch. Elementwise
work is in no table. The KV cache is taken to fit.
"""

import argparse
import csv
import gzip
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np

from pat_jax.engine.buckets import Buckets
from pat_jax.models.config import ModelConfig
from pat_jax.models.presets import preset
from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.types import Split

NUM_DEVICES = 8
SPLITS = tuple(Split(NUM_DEVICES // tp, tp) for tp in (1, 2, 4, 8))
GPUS = {"8xH100": ("h100", "H100-SXM-80GB"), "8xA100": ("a100", "A100-SXM4-80GB")}
MODELS = ("llama-3.1-8b", "qwen3-14b")
HOST_S_PER_ROW = 2e-5  # of a group, in each decode step
SWITCH_S = 0.05  # assumed: draining the burst, launching, host accounts
PREFILL_ROWS, PREFILL_CHUNK = 16, 128
BYTES = 2  # of a bf16 number


class NoData(Exception):
    """The folder of kernel tables is not there."""


class Line:
    """Milliseconds over one size: straight lines between points, the last slope beyond them."""

    def __init__(self, points: dict[int, float]):
        self.sizes = np.array(sorted(points), float)
        self.ms = np.array([points[int(size)] for size in self.sizes])

    def __call__(self, size: float) -> float:
        if size <= self.sizes[-1] or len(self.sizes) == 1:
            return float(np.interp(size, self.sizes, self.ms))
        (x0, x1), (y0, y1) = self.sizes[-2:], self.ms[-2:]
        return float(y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (size - x1))


@dataclass(frozen=True)
class Chip:
    hbm_bytes_s: float
    link_bytes_s: float  # one way


class KernelTables:
    """The measurements of one kind of GPU."""

    def __init__(self, data: Path, gpu: str):
        """
        Raises:
          NoData: the folder or one of its files is missing.
        """
        self.prefix, self.chip_name = GPUS[gpu]
        self.folder = data / "calibration"
        if not self.folder.is_dir():
            raise NoData(
                f"no kernel tables in {data}: expected a folder calibration/ there; "
                f"name the folder that holds it with --data."
            )

    def _rows(self, name: str) -> Iterator[dict[str, str]]:
        (path,) = self.folder.glob(f"aiconfigurator/{self.prefix}_*_{name}")
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from csv.DictReader(file)

    @cached_property
    def chip(self) -> Chip:
        with (self.folder / "specs" / "accelerator_specs.csv").open() as file:
            (row,) = [row for row in csv.DictReader(file) if row["chip"] == self.chip_name]
        return Chip(float(row["hbm_bytes_s"]), float(row["link_bytes_s_one_way"]))

    @cached_property
    def _gemms(self) -> dict[tuple[int, int], Line]:
        table: dict = defaultdict(dict)
        for row in self._rows("gemm_bf16.csv.gz"):
            table[int(row["n"]), int(row["k"])][int(row["m"])] = float(row["latency_ms"])
        return {sizes: Line(over_m) for sizes, over_m in table.items()}

    @cached_property
    def _gemm_sizes(self) -> list[int]:
        return sorted({n for n, _ in self._gemms})

    def gemm(self, m: int, n: int, k: int) -> float:
        """ms of [m, k] times [k, n]."""
        along_n = {}
        for n_at in _around(self._gemm_sizes, n):
            along_k = {
                k_at: self._gemms[n_at, k_at](m)
                for k_at in _around(self._gemm_sizes, k)
                if (n_at, k_at) in self._gemms
            }
            along_n[n_at] = Line(along_k)(k)
        return Line(along_n)(n)

    @cached_property
    def _decode_attention(self) -> dict:
        table: dict = defaultdict(dict)
        for row in self._rows("decode_attention_bf16.csv"):
            key = int(row["num_key_value_heads"]), int(row["num_heads"]), int(row["batch_size"])
            table[key][int(row["step"]) + 1] = float(row["latency_ms"])
        return table

    def decode_attention(self, rows: int, length: int, heads: int, kv_heads: int) -> float:
        """ms of one layer, `rows` sequences of `length` tokens."""
        table = self._decode_attention
        measured = sorted({h for kv, h, _ in table if kv == kv_heads})
        batches = sorted({b for kv, _, b in table if kv == kv_heads})
        along_heads = {}
        for h in _around(measured, heads):
            some = [b for b in batches if (kv_heads, h, b) in table]
            around = _around(some, rows)
            along_heads[h] = Line({b: Line(table[kv_heads, h, b])(length) for b in around})(rows)
        return Line(along_heads)(heads)

    @cached_property
    def _prefill_attention(self) -> dict:
        table: dict = defaultdict(dict)
        for row in self._rows("prefill_attention_bf16.csv"):
            key = int(row["num_key_value_heads"]), int(row["num_heads"]), int(row["isl"])
            table[key][int(row["batch_size"])] = float(row["latency_ms"])
        return table

    def prefill_attention(self, rows: int, length: int, heads: int, kv_heads: int) -> float:
        """ms of one layer, `rows` prompts of `length` tokens each; past the table by length²."""
        table = self._prefill_attention
        along_heads = {}
        for h in _around(sorted({h for kv, h, _ in table if kv == kv_heads}), heads):
            lengths = sorted(n for kv, head, n in table if (kv, head) == (kv_heads, h))
            longest = min(length, lengths[-1])
            around = _around(lengths, longest)
            ms = Line({n: Line(table[kv_heads, h, n])(rows) for n in around})(longest)
            along_heads[h] = ms * (length / longest) ** 2
        return Line(along_heads)(heads)

    @cached_property
    def _all_reduces(self) -> dict[int, Line]:
        points: dict = defaultdict(dict)
        for row in self._rows("custom_allreduce.csv"):
            if row["backend"] == "sglang_graph":
                elements = int(row["message_elems_bf16"])
                points[int(row["num_gpus"])][elements] = float(row["latency_ms"])
        return {gpus: Line(line) for gpus, line in points.items()}

    def all_reduce(self, gpus: int, elements: int) -> float:
        """ms of one all-reduce inside a CUDA graph."""
        return self._all_reduces[gpus](elements) if gpus > 1 else 0.0


def _around(sizes: Sequence[int], size: int) -> list[int]:
    """The two measured sizes to draw a line through; the size itself where it was measured."""
    if size in sizes:
        return [size]
    for low, high in pairwise(sizes):
        if low < size < high:
            return [low, high]
    return list(sizes[:1] if size < sizes[0] else sizes[-2:])


class Composer:
    """One model's decode steps, prefills and switches from a GPU's kernels. Seconds."""

    def __init__(self, kernels: KernelTables, model: ModelConfig, switch_s: float = SWITCH_S):
        self.kernels, self.model, self.switch_s = kernels, model, switch_s

    def _matrices_ms(self, tokens: int, tp: int) -> float:
        """One layer's GEMMs and all-reduces."""
        model, gemm = self.model, self.kernels.gemm
        query_and_kv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        return (
            gemm(tokens, query_and_kv // tp, model.embed_dim)
            + gemm(tokens, model.embed_dim, model.num_heads * model.head_dim // tp)
            + gemm(tokens, 2 * model.mlp_dim // tp, model.embed_dim)
            + gemm(tokens, model.embed_dim, model.mlp_dim // tp)
            + 2 * self.kernels.all_reduce(tp, tokens * model.embed_dim)
        )

    def decode_step(self, split: Split, rows: int, length: int) -> float:
        model, tp = self.model, split.tp
        heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
        layer = self._matrices_ms(rows, tp)
        layer += self.kernels.decode_attention(rows, length, heads, kv_heads)
        lm_head = self.kernels.gemm(rows, model.padded_vocab_size // tp, model.embed_dim)
        return (model.num_layers * layer + lm_head) / 1e3 + HOST_S_PER_ROW * rows

    def prefill_call(self, split: Split, length: int) -> float:
        """One chunk of a few rows; attention as its share of a prefill of `length` tokens."""
        model, tp, chunk = self.model, split.tp, min(PREFILL_CHUNK, length)
        heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
        attention = self.kernels.prefill_attention(PREFILL_ROWS, length, heads, kv_heads)
        layer = self._matrices_ms(PREFILL_ROWS * chunk, tp) + attention * chunk / length
        return model.num_layers * layer / 1e3

    def reslice(self, source: Split, target: Split) -> float:
        chip, shard = self.kernels.chip, weight_bytes(self.model) / target.tp
        if target.tp > source.tp:
            return self.switch_s + 2 * shard / chip.hbm_bytes_s
        return self.switch_s + shard * (1 - target.tp / source.tp) / chip.link_bytes_s

    def migrate(self, source: Split, target: Split, rows: int, length: int) -> float:
        """`rows` a group leave `source`; each device keeps the part it holds in both layouts."""
        held = rows * length * self.model.kv_bytes_per_token / source.tp
        ratio = max(source.dp, target.dp) / min(source.dp, target.dp)
        return held * (1 - 1 / ratio) / self.kernels.chip.link_bytes_s

    def latency_model(self, buckets: Buckets) -> LatencyModel:
        """Times at every bucket; a larger one never costs less than a smaller one."""
        decode = {}
        for split in SPLITS:
            rows, lengths = buckets.rows[split], buckets.lengths
            step = np.array([[self.decode_step(split, n, m) for m in lengths] for n in rows])
            step = np.maximum.accumulate(np.maximum.accumulate(step, axis=0), axis=1)
            decode |= {
                (split, n, m): float(step[i, j])
                for i, n in enumerate(rows)
                for j, m in enumerate(lengths)
            }
        pairs = list(permutations(SPLITS, 2))
        return LatencyModel(
            decode_table=decode,
            reslice_table={pair: self.reslice(*pair) for pair in pairs},
            migrate_table={
                (*pair, n, m): self.migrate(*pair, n, m)
                for pair in pairs
                for n in buckets.rows[pair[0]]
                for m in buckets.lengths
            },
            prefill_table={
                (split, m): self.prefill_call(split, m) for split in SPLITS for m in buckets.lengths
            },
            prefill_rows=PREFILL_ROWS,
            prefill_chunk=PREFILL_CHUNK,
        )


def weight_bytes(model: ModelConfig) -> int:
    """Of the matrices; norms are too small to count."""
    query_and_kv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attention = (query_and_kv + model.num_heads * model.head_dim) * model.embed_dim
    layer = attention + 3 * model.mlp_dim * model.embed_dim
    ends = (1 if model.tie_embeddings else 2) * model.padded_vocab_size * model.embed_dim
    return BYTES * (model.num_layers * layer + ends)


def add_data_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("../shared/data"),
        help="folder that holds calibration/ (kernel tables) and lengths/",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--length", type=int, default=1024, help="context in tokens")
    args = parser.parse_args()
    try:
        for gpu in GPUS:
            kernels = KernelTables(args.data, gpu)
            for name in MODELS:
                print_steps(Composer(kernels, preset(name)), f"{name} on {gpu}", args.length)
    except NoData as error:
        sys.exit(str(error))


def print_steps(composer: Composer, title: str, length: int) -> None:
    print(f"{title}: one decode step in ms, {length} tokens of context")
    print("live sequences", *(f"{split!s:>8}" for split in SPLITS))
    for live in (8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        steps = [composer.decode_step(split, -(-live // split.dp), length) for split in SPLITS]
        print(f"{live:14}", *(f"{1e3 * seconds:8.2f}" for seconds in steps))


if __name__ == "__main__":
    main()
