"""Switching changes nothing: adaptive against static rollouts, token by token.

    python -m benchmarks.lossless [--output benchmarks/results/lossless.json]

Eight CPU devices; models whose KV heads are more and fewer than TP, and whose vocabulary no TP
divides. Static and adaptive runs share a seed. Wherever their tokens differ first, an independent
forward pass (`near_ties.py`) says whether that token was a near-tie.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.near_ties import Judge, Tally, compare
from pat_jax.common.devices import configure
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.sampling import sequence_key
from pat_jax.engine.layout.layout import Layout
from pat_jax.engine.report import RolloutReport
from pat_jax.engine.rollout import RolloutEngine
from pat_jax.engine.sequences.sequence_table import Completion, Request
from pat_jax.engine.sequences.types import Sampling
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import MIGRATE_ALL, RECOMPUTE_ALL, Carry, Load, Plan, Split

_BASE = ModelConfig(
    architecture="qwen3",
    vocab_size=61,
    embed_dim=32,
    mlp_dim=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
    qk_norm=True,
    vocab_multiple=8,
)
MODELS = {
    "kv8": _BASE,
    "kv2": replace(
        _BASE,
        architecture="qwen2",
        num_kv_heads=2,
        qk_norm=False,
        attention_bias=True,
        vocab_multiple=32,
    ),
    # 96 rows of embedding: with TP 8 the last shards are padding only.
    "kv1": replace(
        _BASE,
        architecture="llama",
        num_kv_heads=1,
        qk_norm=False,
        tie_embeddings=True,
        vocab_multiple=48,
    ),
}
EOS_IDS = (0, 1, 2)
CARRIES: tuple[Carry, ...] = ("migrate", "mixed", "recompute")
PATHS = ((1, 2, 4, 8, 2), (1, 8), (8, 1), (2, 8, 1), (4, 1, 8), (8, 4, 2, 1))  # TP degrees


@dataclass(frozen=True)
class Settings:
    """How much is generated, and in which shapes."""

    sequences: int = 16
    max_prompt_length: int = 12
    max_completion_length: int = 52
    min_rows: int = 4
    min_length: int = 32
    page_size: int = 8
    prefill_blocks: int = 4
    reslice_chunk_bytes: int = 2**14  # several chunks even of such small models
    max_logprobs: int = 0
    weights: WeightFormat = "auto"

    @property
    def rollout(self) -> RolloutConfig:
        return RolloutConfig(
            max_prompt_length=self.max_prompt_length,
            max_completion_length=self.max_completion_length,
            check_every=2,
            burst_steps=4,
            page_size=self.page_size,
            prefill_blocks=self.prefill_blocks,
            min_rows=self.min_rows,
            min_length=self.min_length,
            max_logprobs=self.max_logprobs,
            weights=self.weights,
        )


THOROUGH = Settings(
    sequences=32, max_completion_length=116, min_rows=8, min_length=64, page_size=16
)
SEEDS = (0, 1)


class Halved(ScriptedPath):
    """The shorter half of the sequences is recomputed, the longer migrates."""

    def plan(self, load: Load, current: Split) -> Plan:
        below = int(np.median(load.context))
        return replace(super().plan(load, current), recompute_below=below)


class Subject:
    """One model on all devices: an engine, the weights it gets, and a judge that shares neither."""

    def __init__(self, config: ModelConfig, settings: Settings, dtype: jnp.dtype = jnp.float32):
        unquantized = Policy.from_config(config)
        self.policy, self.settings, self.dtype = (
            unquantized.with_weights(settings.weights),
            settings,
            dtype,
        )
        self.params: Params = jax.device_get(self.policy.store(_lively(unquantized), dtype))
        self.engine = RolloutEngine(
            self.policy,
            jax.devices(),
            settings.rollout,
            capacity=settings.sequences,
            eos_ids=EOS_IDS,
            dtype=dtype,
            reslice_chunk_bytes=settings.reslice_chunk_bytes,
        )
        self.engine.compile()

    @cached_property
    def judge(self) -> Judge:
        longest = self.settings.max_prompt_length + self.settings.max_completion_length
        return Judge(self.policy, self.params, self.dtype, longest)

    def weights(self, layout: Layout) -> Params:
        """A copy of the weights on the shards of `layout`, for the engine to delete."""
        return jax.device_put(self.params, layout.param_shardings(self.policy))

    def run(
        self, requests: Sequence[Request], planner: Planner
    ) -> tuple[list[Completion], RolloutReport]:
        none = np.zeros(0, int)
        layout = self.engine.layouts[planner.start(Load(none, none, none, none))]
        self.engine.set_weights(self.weights(layout), layout)
        completions, report = self.engine.rollout(requests, planner)
        self.engine.release_weights()
        return completions, report

    def static(self, tp: int) -> FixedLayout:
        return FixedLayout(next(split for split in self.engine.layouts if split.tp == tp))

    def adaptive(self, path: Sequence[int], carry: Carry, num_sequences: int) -> ScriptedPath:
        """Along `path`, the switches spread evenly over the sequences that finish."""
        splits = {split.tp: split for split in self.engine.layouts}
        at = [num_sequences * (len(path) - i) // len(path) for i in range(1, len(path))]
        below = RECOMPUTE_ALL if carry == "recompute" else MIGRATE_ALL
        steps = (Step(splits[tp], live, below) for tp, live in zip(path[1:], at, strict=True))
        script = Halved if carry == "mixed" else ScriptedPath
        return script(splits[path[0]], tuple(steps))


def _lively(policy: Policy) -> Params:
    """Weights so large that every part of the model moves its output, and no token is certain."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: np.asarray(x) + rng.normal(0, 0.2, x.shape).astype(np.float32), policy.init(0)
    )


KINDS = ("greedy", "sampled", "filtered", "penalized")


def kind(request: Request) -> str:
    sampling = request.sampling
    if sampling.has_penalty:
        return "penalized"
    if sampling.temperature == 0:
        return "greedy"
    return "filtered" if sampling.top_k or sampling.top_p < 1 else "sampled"


def make_requests(settings: Settings, seed: int) -> list[Request]:
    """Every kind of sampling and of ending, with lengths from a few tokens to the most."""
    rng = np.random.default_rng(seed)
    longest, vocab = settings.max_completion_length, _BASE.vocab_size
    options = {
        "greedy": Sampling(temperature=0.0),
        "sampled": Sampling(),
        "filtered": Sampling(temperature=0.8, top_k=12, top_p=0.9),
        "penalized": Sampling(min_p=0.01, repetition_penalty=1.3, presence_penalty=0.5),
    }
    requests = []
    for i in range(settings.sequences):
        # Two of three run to a length of their own, the others to an end-of-sequence token.
        is_forced = i % 9 < 6
        length = longest * (i + 1) // settings.sequences if is_forced else longest
        requests.append(
            Request(
                tokens=tuple(
                    rng.integers(3, vocab, rng.integers(1, settings.max_prompt_length + 1))
                ),
                key=sequence_key(seed, i),
                max_new_tokens=max(1, length),
                ignore_eos=is_forced,
                sampling=options[KINDS[i % 4]],
            )
        )
    return requests


def tally(
    subject: Subject,
    requests: Sequence[Request],
    static: Sequence[Completion],
    others: Sequence[Sequence[Completion]],
) -> dict[str, Tally]:
    """Other runs against a static one, by kind of sampling."""
    counts: dict[str, Tally] = dict.fromkeys(KINDS, Tally())
    decisions = subject.judge.decisions(requests, static)
    for other in others:
        for request, a, b, decided in zip(requests, static, other, decisions, strict=True):
            counts[kind(request)] += compare(a, b, decided)
    return counts


def measure(
    models: Sequence[str], dtype: jnp.dtype, settings: Settings, seeds: Sequence[int]
) -> Iterator[dict]:
    """One record for each model, seed and path: what was compared and what came out."""
    for name in models:
        subject = Subject(MODELS[name], settings, dtype)
        for seed in seeds:
            requests = make_requests(settings, seed)
            static, _ = subject.run(requests, subject.static(1))
            for path in PATHS:
                for carry in CARRIES:
                    planner = subject.adaptive(path, carry, len(requests))
                    adaptive, report = subject.run(requests, planner)
                    yield {
                        "model": name,
                        "dtype": jnp.dtype(dtype).name,
                        "seed": seed,
                        "path": [s.source for s in report.switches[:1]]
                        + [s.target for s in report.switches],
                        "wanted_tp": path,
                        "carry": carry,
                        "counts": tally(subject, requests, static, [adaptive]),
                    }


def summary(records: Sequence[dict]) -> dict[str, dict]:
    """Totals and rates by data type and kind of sampling."""
    totals: dict[str, dict[str, Tally]] = {}
    for record in records:
        by_kind = totals.setdefault(record["dtype"], dict.fromkeys(("all", *KINDS), Tally()))
        for name, counts in record["counts"].items():
            by_kind[name] += counts
            by_kind["all"] += counts
    return {
        dtype: {
            name: asdict(total)
            | {
                "near_tie_rate": total.near_ties / total.tokens,
                "divergence_rate": total.divergences / total.compared,
            }
            for name, total in by_kind.items()
        }
        for dtype, by_kind in totals.items()
    }


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return (
        f"{os.cpu_count()} cores ({cpu}), {len(jax.devices())} CPU devices, JAX {jax.__version__}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/lossless.json"))
    output = parser.parse_args().output
    configure(8)
    start, records = time.perf_counter(), []
    for models, dtype in ((tuple(MODELS), jnp.float32), (("kv2",), jnp.bfloat16)):
        for record in measure(models, dtype, THOROUGH, SEEDS):
            records.append(record)
            total = sum(record["counts"].values(), Tally())
            print(
                f"{record['model']} {record['dtype']} seed {record['seed']} {record['carry']} "
                f"{' '.join(record['path'])}: {total.tokens} tokens, {total.divergences} divergences, "
                f"{total.unexplained} unexplained, log-probabilities within "
                f"{total.max_logprob_difference:.1e}",
                flush=True,
            )
    result = {
        "command": "python -m benchmarks.lossless",
        "machine": machine(),
        "seconds": round(time.perf_counter() - start),
        "settings": asdict(THOROUGH),
        "seeds": SEEDS,
        "summary": summary(records),
        "runs": [
            record | {"counts": asdict(sum(record["counts"].values(), Tally()))}
            for record in records
        ],
    }
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
