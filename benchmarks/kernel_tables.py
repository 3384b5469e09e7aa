"""Latency models of machines that are not here, composed from published kernel measurements.

    python -m benchmarks.kernel_tables --data ../shared/data

Measured, on the GPU named (aiconfigurator@095f58a5: SGLang 0.5.10, bf16): every GEMM, decode and
prefill attention of one layer, the all-reduce inside a CUDA graph. Between measured points times are
interpolated in a straight line; past the last one they go on with the slope of the last two.

Computed: a decode step is the sum of its kernels over all layers and the lm head; re-slicing reads
and writes the new shards at HBM bandwidth (going down: gathers them over NVLink); migrating, and
moving sequences between the groups of a layout, sends what a device gives away at one-way NVLink
bandwidth; recomputing is a prefill.

Assumed: 0.02 ms a row of host and sampling time in each step (what the kernels lack against measured
end-to-end rows, Llama-3.1-8B on H100), and `SWITCH_S` of host and launch time a switch; a move between
groups is charged its bytes alone. Elementwise work is in no table. The KV cache is taken to fit.
"""

import argparse
import sys
from itertools import permutations
from pathlib import Path

import numpy as np

from benchmarks.kernel_files import GPUS, KernelTables, NoData
from pat_jax.config import RolloutConfig
from pat_jax.engine.buckets import Buckets
from pat_jax.engine.rounds import SIZES
from pat_jax.models.config import ModelConfig
from pat_jax.models.presets import preset
from pat_jax.planning.latency import ROUNDS, LatencyModel
from pat_jax.planning.types import Split

NUM_DEVICES = 8
SPLITS = tuple(Split(NUM_DEVICES // tp, tp) for tp in (1, 2, 4, 8))
MODELS = ("llama-3.1-8b", "qwen3-14b")
HOST_S_PER_ROW = 2e-5  # of a group, in each decode step
SWITCH_S = 0.05  # assumed: draining the burst, launching, host accounts
PREFILL_BLOCKS = 128  # pages of a group in one call
PREFILL_ROWS = 16  # prompts of the measured attention
PAGE_SIZE = RolloutConfig().page_size
ROUND_TOKENS = SIZES[0] * PAGE_SIZE
BYTES = 2  # of a bf16 number


class Composer:
    """One model's decode steps, prefills and switches from a GPU's kernels. Seconds."""

    def __init__(self, kernels: KernelTables, model: ModelConfig, switch_s: float = SWITCH_S):
        self.kernels, self.model, self.switch_s = kernels, model, switch_s

    def _heads(self, tp: int) -> tuple[int, int]:
        """Query and KV heads of one device."""
        return self.model.num_heads // tp, max(1, self.model.num_kv_heads // tp)

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
        layer = self._matrices_ms(rows, tp)
        layer += self.kernels.decode_attention(rows, length, *self._heads(tp))
        lm_head = self.kernels.gemm(rows, model.padded_vocab_size // tp, model.embed_dim)
        return (model.num_layers * layer + lm_head) / 1e3 + HOST_S_PER_ROW * rows

    def prefill_call(self, split: Split, length: int) -> float:
        """One call of positions up to `length`; attention as its share of whole prompts' prefill.

        A bucket holds the upper half of its positions: they see half as much again as the mean.
        """
        model, tp, tokens = self.model, split.tp, PREFILL_BLOCKS * PAGE_SIZE
        attention = self.kernels.prefill_attention(PREFILL_ROWS, length, *self._heads(tp))
        share = 1.5 * tokens / (PREFILL_ROWS * length)
        layer = self._matrices_ms(tokens, tp) + attention * share
        return model.num_layers * layer / 1e3

    def reslice(self, source: Split, target: Split) -> float:
        chip, shard = self.kernels.chip, weight_bytes(self.model) / target.tp
        if target.tp > source.tp:
            return self.switch_s + 2 * shard / chip.hbm_bytes_s
        return self.switch_s + shard * (1 - target.tp / source.tp) / chip.link_bytes_s

    def migrate(self, source: Split, target: Split) -> float:
        """A round of pages; each device of a merging group keeps the part it holds in both layouts.

        Whether all groups send or one: the link of a sender is what takes the time.
        """
        narrow, wide = sorted((source.tp, target.tp))
        sent = ROUND_TOKENS * self.model.kv_bytes_per_token / narrow * (1 - narrow / wide)
        return sent / self.kernels.chip.link_bytes_s

    def shift(self, split: Split) -> float:
        """A round of pages to other groups: each device of a group sends its part of all of them."""
        sent = ROUND_TOKENS * self.model.kv_bytes_per_token / split.tp
        return sent / self.kernels.chip.link_bytes_s

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
        rounds = {(*pair, kind): self.migrate(*pair) for pair in pairs for kind in ROUNDS}
        rounds |= {(split, split, ROUNDS[0]): self.shift(split) for split in SPLITS if split.dp > 1}
        return LatencyModel(
            decode_table=decode,
            reslice_table={pair: self.reslice(*pair) for pair in pairs},
            migrate_table=rounds,
            prefill_table={
                (split, m): self.prefill_call(split, m) for split in SPLITS for m in buckets.lengths
            },
            prefill_blocks=PREFILL_BLOCKS,
            page_size=PAGE_SIZE,
            round_tokens=ROUND_TOKENS,
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
