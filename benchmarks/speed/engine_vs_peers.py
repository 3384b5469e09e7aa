"""Useful tokens a second of the rollout engine, of Tunix's sampler and of `transformers`.

    python -m benchmarks.speed.engine_vs_peers --tunix ENV/bin/python --transformers ENV/bin/python \
        --out benchmarks/results/engine_vs_peers_cpu2.json

Each peer has an environment of its own (see `benchmarks/peers`) and runs in a process of its own, all
by turns in one run: same weights (random, written once as a checkpoint), same prompts, same forced
response lengths. Lengths are `equal`, or `heavy`-tailed with a mean of half the longest; tokens past
a response's own length are not useful. Every system has the whole machine while it runs; the engine
runs under each of its static layouts. Ratios are taken within a round; medians over rounds, with
bootstrap intervals, are printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import by_turns, machine, median_interval, options, write
from pat_jax.common.devices import configure
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.responses import Request
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Split

PEERS = Path(__file__).parents[1] / "peers"
SMALL = ModelConfig(
    architecture="qwen3",
    vocab_size=512,
    embed_dim=256,
    mlp_dim=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    qk_norm=True,
    tie_embeddings=True,
    vocab_multiple=128,
)


@dataclass(frozen=True)
class Batch:
    prompts: list[list[int]]  # of one length
    lengths: list[int]  # of the responses
    seed: int

    @property
    def useful_tokens(self) -> int:
        return sum(self.lengths)


def draw(seed: int, count: int, prompt: int, longest: int, *, is_heavy: bool, vocab: int) -> Batch:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(2, vocab, (count, prompt)).tolist()
    lengths = heavy_lengths(rng, count, longest) if is_heavy else np.full(count, longest)
    return Batch(prompts, lengths.tolist(), seed)


def heavy_lengths(rng: np.random.Generator, count: int, longest: int) -> np.ndarray:
    """Log-normal (sigma 1), scaled to a mean of half the longest, which one of them has."""
    drawn = rng.lognormal(0.0, 1.0, count)
    drawn /= drawn.max()
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        lengths = np.clip(np.round(longest * np.minimum(middle * drawn, 1)), 1, longest)
        low, high = (middle, high) if lengths.mean() < longest / 2 else (low, middle)
    lengths[np.argmax(drawn)] = longest
    return lengths.astype(int)


class Peer:
    """Another system in a process of its own, which answers with the seconds that a batch took."""

    def __init__(self, python: Path, script: str, *arguments: str):
        # The peer sees none of the settings that this process made for its own backend.
        hidden = ("XLA_FLAGS", "NPROC", "PYTHONPATH")
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        self.process = subprocess.Popen(
            [str(python), str(PEERS / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
        )
        self.versions = self._read()

    def __call__(self, batch: Batch) -> float:
        assert self.process.stdin is not None
        request = {"prompts": batch.prompts, "lengths": batch.lengths, "seed": batch.seed}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()["seconds"]

    def _read(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with status {self.process.wait()}.")
        return json.loads(line)


def engines(
    policy: Policy, weights: Params, args: argparse.Namespace
) -> dict[str, Callable[[Batch], float]]:
    """The rollout engine under each of its layouts: seconds of a batch."""
    config = replace(
        RolloutConfig(),
        max_prompt_length=args.prompt,
        max_completion_length=args.new_tokens,
        min_rows=1,
    )
    engine = RolloutEngine(policy, jax.devices(), config, capacity=args.sequences, eos_ids=(1,))
    engine.compile()

    def run(split: Split, batch: Batch) -> float:
        layout = engine.layouts[split]
        placed = jax.device_put(weights, layout.param_shardings(policy))
        engine.set_weights(jax.block_until_ready(placed), layout)
        requests = [
            Request(tuple(prompt), sequence_key(batch.seed, i), int(length), ignore_eos=True)
            for i, (prompt, length) in enumerate(zip(batch.prompts, batch.lengths, strict=True))
        ]
        start = time.perf_counter()
        done, _ = engine.rollout(requests, FixedLayout(split))
        seconds = time.perf_counter() - start
        engine.release_weights()
        assert [len(one.tokens) for one in done] == batch.lengths
        return seconds

    return {f"pat_jax {split}": partial(run, split) for split in engine.layouts}


def compare(
    systems: dict[str, Callable[[Batch], float]], args: argparse.Namespace, vocab: int
) -> dict[str, dict]:
    results = {}
    for kind in ("equal", "heavy"):
        shape, is_heavy = (args.sequences, args.prompt, args.new_tokens), kind == "heavy"
        batches = [
            draw(nth, *shape, is_heavy=is_heavy, vocab=vocab) for nth in range(args.rounds + 1)
        ]
        seconds = by_turns(systems, batches, warm_up=1)
        useful = np.array([batch.useful_tokens for batch in batches[1:]])
        results[kind] = summarize({n: (useful / s).tolist() for n, s in seconds.items()})
    return results


def summarize(rates: dict[str, list[float]]) -> dict[str, dict]:
    """Each system's useful tokens/s, and how often the best layout's that is."""
    rng = np.random.default_rng(0)
    ours = [name for name in rates if name.startswith("pat_jax")]
    best = max(ours, key=lambda name: statistics.median(rates[name]))
    rows = {}
    for name, samples in rates.items():
        ratio = median_interval((np.array(rates[best]) / np.array(samples)).tolist(), rng)
        median = statistics.median(samples)
        rows[name] = {"tokens_per_s": median, "best_is_times": ratio, "samples": samples}
        times = f"{ratio[0]:.2f} ({ratio[1]:.2f} - {ratio[2]:.2f})"
        print(f"{name:20} {median:10.1f} useful tokens/s; {best} has {times} times that")
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="small", help="small (2.5 M), or a preset of Qwen3")
    parser.add_argument("--tunix", type=Path, help="Python with google-tunix")
    parser.add_argument("--transformers", type=Path, help="Python with torch and transformers")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of every prompt")
    parser.add_argument("--new_tokens", type=int, default=128, help="of the longest response")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    about = machine(configure(0))
    config = SMALL if args.model == "small" else preset(args.model)
    policy = Policy.from_config(config)
    weights = jax.device_get(policy.init(0))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = f"{folder}/model"
        export(checkpoint, policy, policy.init(0), jnp.float32)
        peers = {}
        if args.tunix:
            length = str(args.prompt + args.new_tokens)
            peers["tunix"] = Peer(args.tunix, "tunix_sampler.py", checkpoint, length)
        if args.transformers:
            peers["transformers"] = Peer(args.transformers, "hf_transformers.py", checkpoint)
        results = compare(engines(policy, weights, args) | peers, args, config.vocab_size)
    for peer in peers.values():
        peer.process.terminate()
    write(
        args.out,
        {
            "machine": about | {"load_after": os.getloadavg()[0]},
            "peers": {name: peer.versions for name, peer in peers.items()},
            "lengths": results,
        },
    )


if __name__ == "__main__":
    main()
