"""The draw of a token beside the one that it replaced: seconds, and how often two models agree.

    python -m benchmarks.token_draw --out benchmarks/results/token_draw_cpu2.json

Two-level Gumbel (`pat_jax/engine/device/gumbel.py`) against the inverse of the cumulative distribution in
vocabulary order, which is kept here alone. Seconds: steps that do nothing but draw, in one program with the keys or numbers of
all of them made before, on every device the same rows, the two by turns; medians, with intervals by bootstrap. Agreement:
computed from two softmax of Gaussian logits, the second with Gaussian noise added, in float64; nothing is drawn for it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from benchmarks.adaptive_vs_static import describe_machine, median_interval
from pat_jax.common.devices import configure
from pat_jax.engine.device import gumbel

SIZES = ((151_936, 16), (8_192, 64), (64, 16))  # tokens of the vocabulary, rows
OLD, NEW = "inverse of the cumulative distribution", "two-level Gumbel"
OLD_BLOCK = 512
# Of logits, then of the noise on them: entropies from 5 to 0.5 nats; another model, and rounding in bfloat16.
PAIRS = ((3.0, 0.7), (4.2, 0.5), (5.8, 1.0), (10.0, 1.5), (4.2, 0.02), (8.0, 0.02), (10.0, 0.02))
VOCAB = 8_192


def numbers(keys: Array, positions: Array) -> Array:
    """Uniform in [0, 1)."""

    def one(key: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position))

    return jax.vmap(one)(keys, positions)


def inverted(logits: Array, divisor: Array, number: Array, is_greedy: Array) -> tuple[Array, Array]:
    """The token at which the cumulative distribution passes the number, or the likeliest."""
    logits = logits / divisor[:, None]
    width = max(n for n in range(1, OLD_BLOCK + 1) if logits.shape[1] % n == 0)
    blocks = jnp.reshape(logits, (logits.shape[0], -1, width))
    highest = jnp.max(blocks, axis=-1)
    largest = jnp.max(highest, axis=-1)
    block = jnp.argmax(highest, axis=-1)
    best = block * width + jnp.argmax(_block(blocks, block), axis=-1)
    masses = jnp.sum(jnp.exp(blocks - largest[:, None, None]), axis=-1)
    sums = jnp.cumsum(masses, axis=-1)
    reached = jnp.where(masses > 0, sums, 0.0)
    failed = jnp.any(jnp.isnan(masses), axis=-1)
    total = jnp.where(failed, jnp.nan, jnp.max(reached, axis=-1))
    goal = number * total
    block = jnp.argmax(reached > goal[:, None], axis=-1)
    before = jnp.where(block > 0, _pick(sums, jnp.maximum(block - 1, 0)), 0.0)
    probs = jnp.exp(_block(blocks, block) - largest[:, None])
    reached = jnp.where(probs > 0, jnp.cumsum(probs, axis=-1), 0.0)
    is_beyond = reached > (goal - before)[:, None]
    last = width - 1 - jnp.argmax(probs[:, ::-1] > 0, axis=-1)
    inside = jnp.where(jnp.any(is_beyond, axis=-1), jnp.argmax(is_beyond, axis=-1), last)
    tokens = jnp.where(is_greedy | failed, best, block * width + inside).astype(jnp.int32)
    return tokens, _pick(logits, tokens) - largest - jnp.log(total)


def _block(blocks: Array, block: Array) -> Array:
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]


def _pick(x: Array, column: Array) -> Array:
    return jnp.take_along_axis(x, column[:, None], axis=-1)[:, 0]


WAYS = {OLD: (numbers, inverted), NEW: (gumbel.position_keys, gumbel.draw)}


def steps(
    randomness: Callable, draw: Callable, count: int, logits: Array, temperature: Array, keys: Array
) -> tuple[Array, Array]:
    """Sums over `count` draws, each from logits that the one before has touched."""
    is_greedy = temperature <= 0
    divisor = jnp.where(is_greedy, 1.0, temperature)
    positions = jnp.broadcast_to(jnp.arange(count)[:, None], (count, len(keys)))
    each = jax.vmap(randomness, in_axes=(None, 0))(keys, positions)

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        logits, total, logprob = carry
        tokens, logprobs = draw(logits, divisor, each[i], is_greedy)
        # Else what does not change would be computed once, before the loop.
        touched = (tokens[:1, None] % 2).astype(jnp.float32)
        logits = jax.lax.dynamic_update_slice(logits, touched, (0, 0))
        return logits, total + tokens, logprob + logprobs

    zeros = jnp.zeros(len(keys), jnp.int32), jnp.zeros(len(keys))
    return jax.lax.fori_loop(0, count, step, (logits, *zeros))[1:]


def measured(vocab: int, rows: int, rounds: int, count: int) -> dict[str, object]:
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    rng, whole = np.random.default_rng(0), PartitionSpec()
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    keys = rng.integers(0, 2**32, (rows, 2), np.uint32)
    args = jax.device_put((logits, np.ones(rows, np.float32), keys), NamedSharding(mesh, whole))
    programs = {}
    for name, way in WAYS.items():
        one = partial(steps, *way, count)
        mapped = jax.shard_map(one, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        programs[name] = jax.jit(mapped)
        jax.block_until_ready(programs[name](*args))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(rounds):
        for name in programs if turn % 2 else reversed(programs):
            start = time.perf_counter()
            jax.block_until_ready(programs[name](*args))
            seconds[name].append((time.perf_counter() - start) / count)
    ratios = [new / old for new, old in zip(seconds[NEW], seconds[OLD], strict=True)]
    return {
        "vocabulary": vocab,
        "rows": rows,
        "microseconds": {name: round(1e6 * float(np.median(s)), 1) for name, s in seconds.items()},
        "ratio": [round(x, 3) for x in median_interval(ratios, rng)],
    }


def agreement(p: np.ndarray, q: np.ndarray, width: int) -> float:
    """How often two draws with the same noise are the same token, by blocks of `width` tokens."""
    p, q = p.reshape(-1, width), q.reshape(-1, width)
    masses = p.sum(axis=1), q.sum(axis=1)
    inside = [common(a / a.sum(), b / b.sum()).sum() for a, b in zip(p, q, strict=True)]
    return float(common(*masses) @ np.array(inside))


def common(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Of each outcome, that both Gumbel-max draws are it: 1 / Σ_j max(p_j / p_i, q_j / q_i)."""
    order = np.argsort(-p / q, kind="stable")
    by_p, by_q = np.cumsum(p[order]), q.sum() - np.cumsum(q[order])
    found = np.empty_like(p)
    found[order] = 1 / (by_p / p[order] + np.maximum(by_q, 0) / q[order])
    return found


def overlap(p: np.ndarray, q: np.ndarray) -> float:
    """How often two draws by the same number are the same token: the intervals that they share."""
    ends = np.cumsum(p), np.cumsum(q)
    starts = ends[0] - p, ends[1] - q
    return float(np.maximum(np.minimum(*ends) - np.maximum(*starts), 0).sum())


def agreements(pairs: int) -> list[dict[str, float]]:
    rng, found = np.random.default_rng(1), []
    for spread, noise in PAIRS:
        rows = []
        for _ in range(pairs):
            logits = rng.normal(0, spread, VOCAB)
            both = np.stack([logits, logits + rng.normal(0, noise, VOCAB)])
            probs = np.exp(both - both.max(axis=1, keepdims=True))
            p, q = probs / probs.sum(axis=1, keepdims=True)
            distance = np.abs(p - q).sum() / 2
            bound = (1 - distance) / (1 + distance)
            ours = agreement(p, q, gumbel.BLOCK)
            entropy = -(p * np.log(p)).sum()
            rows.append((entropy, 1 - distance, bound, overlap(p, q), ours, ours - bound))
        means = np.mean(rows, axis=0)
        names = ("entropy_nats", "rejection_sampling", "bound", OLD, NEW)
        found.append(
            {"noise": noise}
            | {name: round(float(x), 4) for name, x in zip(names, means, strict=False)}
            | {"least above the bound": round(float(np.min(rows, axis=0)[-1]), 5)}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=8, help="draws of a program")
    parser.add_argument("--pairs", type=int, default=100, help="of distributions, of each kind")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = describe_machine(configure(0))
    timed = [measured(vocab, rows, args.rounds, args.steps) for vocab, rows in SIZES]
    result = {
        "command": "python -m benchmarks.token_draw " + " ".join(sys.argv[1:]),
        "machine": machine,
        "seconds of a draw": timed,
        "agreement": agreements(args.pairs),
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
