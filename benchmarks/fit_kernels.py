"""Fits the coefficients of `profiling/predict/kernel_model.py` and `profiling/predict/links.py` to kernel tables.

    python -m benchmarks.fit_kernels --data ../shared/data

Prints what to put into `profiling/kernel_coefficients.yaml` and `profiling/link_coefficients.yaml`,
with the mean error against every measured kernel that a rollout may run. GPUs: every GEMM, decode and
prefill attention of aiconfigurator@095f58a5; elementwise kernels of vidur@7d475133. TPU: a v6e's
Llama-3.1-8B kernels of LLMServingSim@5daddb21, timed one by one at TP1.

Errors are of the logarithm, large ones counted less: a table has outliers where a library changes
kernels.
"""

import argparse
import csv
import gzip
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from scipy.optimize import least_squares

from benchmarks.kernel_tables import add_data_option
from pat_jax.common.chips import Chip, chips
from pat_jax.profiling.predict.kernel_files import MEASURED, NoData
from pat_jax.profiling.predict.kernel_model import PAGE, SPLIT
from pat_jax.profiling.predict.kernels import BYTES, HEAD_DIM

Columns = Mapping[str, np.ndarray]
TPU = "v6e"
LLAMA = {"embed_dim": 4096, "mlp_dim": 14336, "vocab": 128_256, "kv_heads": 8, "heads": 32}


@dataclass(frozen=True)
class Fit:
    """A kind of kernel: a guess at its coefficients, microseconds by them, and what was measured."""

    start: Mapping[str, float]
    model: Callable[[Mapping[str, float], Columns], np.ndarray]
    rows: Columns
    us: np.ndarray

    def solve(self) -> tuple[dict[str, float], float]:
        """Coefficients, and the mean relative error with them."""
        names = list(self.start)

        def errors(logs: np.ndarray) -> np.ndarray:
            coefficients = dict(zip(names, np.exp(logs), strict=True))
            return np.log(self.model(coefficients, self.rows) / self.us)

        start = np.log(list(self.start.values()))
        least = [0.0 if name == "sharpness" else -np.inf for name in names]
        found = least_squares(errors, start, bounds=(least, np.inf), loss="soft_l1", f_scale=0.1)
        values = {n: float(f"{np.exp(x):.4g}") for n, x in zip(names, found.x, strict=True)}
        return values, float(np.abs(np.expm1(errors(found.x))).mean())


def read(folder: Path, pattern: str) -> dict[str, np.ndarray]:
    """Columns of one CSV file; numbers where they are numbers."""
    (path,) = folder.glob(pattern)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = list(csv.DictReader(file))
    return {name: _numbers([row[name] for row in rows]) for name in rows[0]}


def _numbers(column: list[str]) -> np.ndarray:
    try:
        return np.array(column, float)
    except ValueError:
        return np.array(column)


def _chosen(rows: Columns, which: np.ndarray) -> dict[str, np.ndarray]:
    return {name: column[which] for name, column in rows.items()}


def gemm(chip: Chip, rows: Columns, us: np.ndarray) -> Fit:
    def model(c: Mapping[str, float], r: Columns) -> np.ndarray:
        memory = BYTES * (r["m"] * r["k"] + r["k"] * r["n"] + r["m"] * r["n"])
        memory = 1e6 * memory / (c["memory"] * chip.memory_bytes_s)
        compute = 2e6 * r["m"] * r["n"] * r["k"] / (c["compute"] * chip.flops_s)
        p = c["sharpness"]
        return c["floor_us"] + (memory**p + compute**p) ** (1 / p)

    start = {"floor_us": 4.0, "memory": 0.8, "compute": 0.7, "sharpness": 2.5}
    return Fit(start, model, rows, us)


def decode_attention(chip: Chip, rows: Columns, us: np.ndarray) -> Fit:
    def model(c: Mapping[str, float], r: Columns) -> np.ndarray:
        read = 2e6 * BYTES * HEAD_DIM * r["kv_heads"] * np.maximum(r["length"], PAGE)
        read = r["rows"] * (read / (c["memory"] * chip.memory_bytes_s) + c["row_us"])
        floor = c["floor_us"] + c["split_us"] * np.minimum(1, r["length"] / SPLIT)
        p = c["sharpness"]
        return (floor**p + read**p) ** (1 / p)

    start = {"floor_us": 9.0, "split_us": 3.0, "memory": 0.8, "row_us": 0.01, "sharpness": 1.2}
    return Fit(start, model, rows, us)


def prefill_attention(chip: Chip, rows: Columns, us: np.ndarray) -> Fit:
    def model(c: Mapping[str, float], r: Columns) -> np.ndarray:
        cells = r["rows"] * r["heads"]
        compute = 2e6 * HEAD_DIM * cells * r["length"] ** 2 / (c["compute"] * chip.flops_s)
        return c["floor_us"] + compute + 1e-3 * c["token_ns"] * cells * r["length"]

    return Fit({"floor_us": 10.0, "compute": 0.6, "token_ns": 0.3}, model, rows, us)


def elementwise(chip: Chip, rows: Columns, us: np.ndarray) -> Fit:
    def model(c: Mapping[str, float], r: Columns) -> np.ndarray:
        return c["floor_us"] + 1e6 * r["bytes"] / (c["memory"] * chip.memory_bytes_s)

    return Fit({"floor_us": 2.0, "memory": 0.8}, model, rows, us)


def gpu_kernels(folder: Path, chip: Chip) -> Iterator[tuple[str, Fit]]:
    """Sizes that a rollout runs: up to a prefill call of 4,096 tokens, matrices of real models."""
    tables = folder / "aiconfigurator"
    r = read(tables, f"{chip.name}_*_gemm_bf16.csv.gz")
    r = _chosen(r, (r["m"] <= 4096) & (np.minimum(r["n"], r["k"]) >= 512))
    yield "gemm", gemm(chip, r, 1e3 * r["latency_ms"])
    names = {"batch_size": "rows", "num_heads": "heads", "num_key_value_heads": "kv_heads"}
    r = read(tables, f"{chip.name}_*_decode_attention_bf16.csv")
    r = {names.get(n, n): column for n, column in r.items()} | {"length": r["step"] + 1}
    r = _chosen(r, (r["heads"] <= 64) & (r["length"] <= 32_768))
    yield "decode_attention", decode_attention(chip, r, 1e3 * r["latency_ms"])
    r = read(tables, f"{chip.name}_*_prefill_attention_bf16.csv")
    r = {names.get(n, n): column for n, column in r.items()} | {"length": r["isl"]}
    r = _chosen(r, (r["heads"] <= 64) & (r["length"] >= 128))
    yield "prefill_attention", prefill_attention(chip, r, 1e3 * r["latency_ms"])


def gpu_elementwise(folder: Path, chip: Chip) -> Fit:
    """Norm, rotation, activation and addition, each a kernel of its own there."""
    r = read(folder / "vidur", f"{chip.name}_Llama-2-7b-hf_mlp_median.csv")
    tokens, tp = r["num_tokens"], r["num_tensor_parallel_workers"]
    embed, mlp = r["n_embd"], r["n_expanded_embd"]
    heads = (r["n_head"] + r["n_kv_head"]) / r["n_head"]
    moved = {
        "input_layernorm_ms": 2 * embed,
        "attn_rope_ms": 2 * heads * embed / tp,
        "mlp_act_ms": 3 * mlp / tp,
        "add_ms": 3 * embed,
    }
    num_bytes = np.concatenate([BYTES * tokens * width for width in moved.values()])
    us = 1e3 * np.concatenate([r[name] for name in moved])
    return elementwise(chip, _chosen({"bytes": num_bytes}, us > 0), us[us > 0])


def tpu_kernels(folder: Path, chip: Chip) -> Iterator[tuple[str, Fit]]:
    """Llama-3.1-8B at TP1; of the products those whose time is not shared with their neighbours'.

    The projections of attention take less time there than their weights take to be read: they are
    fetched while another kernel runs.
    """
    r = read(folder / "llmservingsim", "tpu_v6e1_*_layers.csv.gz")
    embed, mlp, vocab = LLAMA["embed_dim"], LLAMA["mlp_dim"], LLAMA["vocab"]
    shapes = {"gate_proj": (mlp, embed), "lm_head": (vocab, embed)}
    parts = []
    for name, (n, k) in shapes.items():
        part = _chosen(r, (r["layer_name"] == name) & (r["input"] >= 8))
        ones = np.ones(len(part["input"]))
        parts.append({"m": part["input"], "n": n * ones, "k": k * ones, "ns": part["latency(ns)"]})
    sizes = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    yield "gemm", gemm(chip, sizes, sizes["ns"] / 1e3)
    r = read(folder / "llmservingsim", "tpu_v6e1_*_attention.csv.gz")
    heads = {"heads": LLAMA["heads"], "kv_heads": LLAMA["kv_heads"]}
    d = _chosen(r, (r["is_prefill"] == "False") & (r["kv_cache_size"] > 0))
    shape = {"rows": d["batch_size"], "length": d["kv_cache_size"]}
    shape |= {name: np.full(len(d["batch_size"]), count) for name, count in heads.items()}
    yield "decode_attention", decode_attention(chip, shape, d["p50_ns"] / 1e3)
    p = _chosen(r, (r["is_prefill"] == "True") & (r["kv_cache_size"] == 0))
    shape = {"rows": np.ones(len(p["p50_ns"])), "length": p["prefill_chunk_size"]}
    shape |= {name: np.full(len(p["p50_ns"]), count) for name, count in heads.items()}
    yield "prefill_attention", prefill_attention(chip, shape, p["p50_ns"] / 1e3)


def custom_sum(chip: Chip, rows: Columns, us: np.ndarray) -> Fit:
    def model(c: Mapping[str, float], r: Columns) -> np.ndarray:
        others, rate = r["devices"] - 1, 1e6 / chip.link_bytes_s
        one = c["one_us"] + c["one_each_us"] * others + r["bytes"] * others * rate / c["one_link"]
        two = c["two_us"] + c["two_each_us"] * others
        two = two + 2 * r["bytes"] * others / r["devices"] * rate / c["two_link"]
        return np.minimum(one, two)

    start = {
        "one_us": 4,
        "one_each_us": 0.1,
        "one_link": 0.8,
        "two_us": 8,
        "two_each_us": 0.8,
        "two_link": 0.7,
    }
    return Fit(start, model, rows, us)


def nccl(chip: Chip, rows: Columns, us: np.ndarray, passes: int) -> Fit:
    def model(c: Mapping[str, float], r: Columns) -> np.ndarray:
        others, rate = r["devices"] - 1, 1e6 / chip.link_bytes_s
        sent = passes * r["bytes"] * others / r["devices"] * rate / c["link"]
        root = c["root_us"] * np.sqrt(r["bytes"] / 1e6)
        return c["floor_us"] + c["each_us"] * others + sent + root

    return Fit({"floor_us": 4.0, "each_us": 1.0, "root_us": 1.0, "link": 0.7}, model, rows, us)


def links(folder: Path, chip: Chip) -> Iterator[tuple[str, Fit]]:
    tables = folder / "aiconfigurator"
    r = read(tables, f"{chip.name}_*_custom_allreduce.csv")
    r = _chosen(r, r["backend"] == "sglang_graph")
    shape = {"devices": r["num_gpus"], "bytes": BYTES * r["message_elems_bf16"]}
    yield "custom", custom_sum(chip, shape, 1e3 * r["latency_ms"])
    table = read(tables, f"{chip.name}_*nccl*.csv")
    for name, kind, passes in (("nccl_sum", "all_reduce", 2), ("nccl_gather", "all_gather", 1)):
        r = _chosen(table, table["op_name"] == kind)
        shape = {"devices": r["num_gpus"], "bytes": BYTES * r["message_elems_fp16"]}
        yield name, nccl(chip, shape, 1e3 * r["latency_ms"], passes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    args = parser.parse_args()
    folder = args.data / "calibration"
    if not folder.is_dir():
        sys.exit(str(NoData.of("kernel tables", args.data, "calibration/")))
    for name in MEASURED:
        show(name, dict(gpu_kernels(folder, chips()[name])))
    for name in ("a100", "h100"):
        show(name, {"elementwise": gpu_elementwise(folder, chips()[name])})
    show(TPU, dict(tpu_kernels(folder, chips()[TPU])))
    show("links", dict(links(folder, chips()["h100"])))


def show(title: str, fits: Mapping[str, Fit]) -> None:
    found = {name: fit.solve() for name, fit in fits.items()}
    print(yaml.safe_dump({title: {name: values for name, (values, _) in found.items()}}))
    for name, (_, error) in found.items():
        print(f"# {name}: {len(fits[name].us)} kernels, mean error {error:.1%}")


if __name__ == "__main__":
    main()
