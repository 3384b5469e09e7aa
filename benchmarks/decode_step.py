"""A decode step on one CPU device against what its bytes and its arithmetic need on that core.

    python -m benchmarks.decode_step --out benchmarks/results/decode_step_cpu.json

Float32 (`--weights auto,int8` decodes with weights kept in each of these), one compute thread. A case decodes bursts behind prompts of equal length. In each round the
read bandwidth (an array of 256 MiB summed, and times a vector: the faster of both), the rate of a
large product and every case are measured by turns; a case's ratios are taken within the round, and
medians over rounds are printed.

    roofline = max(bytes / bandwidth, operations / rate)

Bytes are those that must move: each weight once, and the keys and values of each row's own tokens;
operations are those of the weights and of attention over those tokens. `--profile` prints the time of
each operation of a step instead.
"""

import argparse
import collections
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.adaptive_vs_static import describe_machine
from pat_jax.devices import configure
from pat_jax.engine.sampling import sample, uniform
from pat_jax.engine.state import seen_shape
from pat_jax.engine.types import NO_TOKEN, RowSampling
from pat_jax.models.burst_layer import BurstLayer
from pat_jax.models.config import ModelConfig
from pat_jax.models.paged_layer import PagedLayer
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.models.weight_formats import WeightFormat

PAGE_SIZE = 16
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
class Case:
    name: str
    config: ModelConfig
    rows: int
    prompt: int  # tokens, in every row
    steps: int  # of a burst
    bursts: int
    weights: WeightFormat = "auto"

    @cached_property
    def policy(self) -> Policy:
        return Policy.from_config(self.config).with_weights(self.weights)

    @property
    def mean_context(self) -> float:
        """Tokens that a step reads of a row, its own among them, averaged over the steps."""
        return self.prompt + (self.bursts * self.steps + 1) / 2

    def read(self, policy: Policy) -> tuple[int, int]:
        """Numbers that a step multiplies by, and their bytes: all but rows that are looked up."""
        leaves = jax.tree.leaves(policy.abstract_params)
        rows = self.config.padded_vocab_size * self.config.embed_dim
        looked_up = 0 if self.config.tie_embeddings else rows
        num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        return sum(leaf.size for leaf in leaves) - looked_up, num_bytes - 4 * looked_up

    @property
    def num_bytes(self) -> float:
        config = self.config
        of_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return self.read(self.policy)[1] + 4 * self.rows * self.mean_context * of_token

    @property
    def operations(self) -> float:
        config = self.config
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * self.mean_context
        return self.rows * (2 * self.read(self.policy.with_weights("auto"))[0] + attention)


CASES = (
    Case("small batch 16", SMALL, rows=16, prompt=16, steps=64, bursts=2),
    Case("small batch 8", SMALL, rows=8, prompt=16, steps=64, bursts=2),
    Case("qwen3-0.6b batch 1", preset("qwen3-0.6b"), rows=1, prompt=64, steps=8, bursts=1),
    Case("qwen3-0.6b batch 8", preset("qwen3-0.6b"), rows=8, prompt=64, steps=8, bursts=1),
)


def burst(policy: Policy, steps: int) -> Callable:
    """The engine's decode burst without its bookkeeping: `steps` tokens for every row."""

    def run(params, pools, table, context_table, tokens, start, keys):
        model, rows = policy.bind(params), tokens.shape[0]
        plain, none = RowSampling.empty(rows), jnp.full((rows, 1), NO_TOKEN)
        seen = jnp.zeros(seen_shape(policy.config, rows), jnp.uint32)
        cache = tuple(
            BurstLayer.begin(PagedLayer(pool[0], pool[1], context_table), start, steps)
            for pool in pools
        )
        # The numbers of all steps at once: one by one they cost more than the rest of sampling.
        numbers = jax.vmap(lambda i: uniform(keys, start + 1 + i))(jnp.arange(steps))

        def step(i, carry):
            tokens, position, cache, out = carry
            hidden, cache = model(tokens[:, None], position[:, None], cache)
            logits = model.logits(hidden[:, 0])
            with jax.named_scope("sample"):
                number = jax.lax.dynamic_index_in_dim(numbers, i, keepdims=False)
                tokens, _ = sample(
                    logits, number, plain, seen, none, vocab_size=policy.config.vocab_size
                )
            out = jax.lax.dynamic_update_slice(out, tokens[:, None], (0, i))
            return tokens, position + 1, cache, out

        out = jnp.zeros((rows, steps), jnp.int32)
        carry = jax.lax.fori_loop(0, steps, step, (tokens, start, cache, out))
        tokens, position, cache, out = carry
        ended = [
            layer.end(PagedLayer(pool[0], pool[1], table), position)
            for layer, pool in zip(cache, pools, strict=True)
        ]
        return [(layer.keys, layer.values) for layer in ended], tokens, out

    return run


class Decoder:
    """One case, compiled; calling it decodes every burst behind the prompts once."""

    def __init__(self, case: Case, params):
        self.case, self.params = case, params
        config = case.config
        width = -(-(case.prompt + case.steps * case.bursts) // PAGE_SIZE)
        pages = np.arange(case.rows * width).reshape(case.rows, width) + 1
        self.table = jnp.asarray(pages, jnp.int32)
        shape = (pages.size + 1, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        self.pools = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers)]
        self.tokens = jnp.arange(case.rows, dtype=jnp.int32)
        self.keys = jnp.zeros((case.rows, 2), jnp.uint32)
        run = jax.jit(burst(case.policy, case.steps), donate_argnums=1)
        self.programs = [
            run.lower(self.params, self.pools, *arguments).compile()
            for arguments in map(self._arguments, range(case.bursts))
        ]

    def _arguments(self, nth: int) -> tuple:
        start = self.case.prompt + nth * self.case.steps
        context = self.table[:, : -(-start // PAGE_SIZE)]
        starts = jnp.full(self.case.rows, start, jnp.int32)
        return self.table, context, self.tokens, starts, self.keys

    def __call__(self) -> jax.Array:
        for nth, program in enumerate(self.programs):
            self.pools, self.tokens, out = program(self.params, self.pools, *self._arguments(nth))
        return jax.block_until_ready(out)


def measure(
    cases: list[Case], decoders: list[Decoder], rounds: int, clock: Callable[[], float]
) -> dict[str, dict]:
    def timed(run: Callable[[], object], repeats: int) -> float:
        """Seconds, the fastest of a few."""
        seconds = []
        for _ in range(repeats):
            start = clock()
            jax.block_until_ready(run())
            seconds.append(clock() - start)
        return min(seconds)

    array, vector, square = jnp.ones((16_384, 4096)), jnp.ones((4096, 1)), jnp.ones((1024, 1024))
    total, product = jax.jit(jnp.sum), jax.jit(jnp.matmul)
    found: dict[str, list] = collections.defaultdict(list)
    for nth in range(rounds + 1):
        reads = (lambda: total(array)), (lambda: product(array, vector))
        bandwidth = array.nbytes / min(timed(read, 3) for read in reads)
        rate = 2 * 1024**3 / timed(lambda: product(square, square), 5)
        for case, decoder in zip(cases, decoders, strict=True):
            seconds = timed(decoder, 3) / (case.steps * case.bursts)
            if nth:  # the first round warms up
                found[case.name].append((seconds, bandwidth, rate))
        print(f"round {nth}/{rounds}", file=sys.stderr)
    return {case.name: summary(case, found[case.name]) for case in cases}


def summary(case: Case, rounds: list[tuple[float, float, float]]) -> dict[str, float]:
    def median(of: Callable[[float, float, float], float]) -> float:
        return statistics.median(of(*values) for values in rounds)

    return {
        "step_ms": median(lambda s, b, r: 1e3 * s),
        "bandwidth_gb_s": median(lambda s, b, r: b / 1e9),
        "product_gflop_s": median(lambda s, b, r: r / 1e9),
        "megabytes": case.num_bytes / 1e6,
        "megaflops": case.operations / 1e6,
        "of_bytes": median(lambda s, b, r: s / (case.num_bytes / b)),
        "of_operations": median(lambda s, b, r: s / (case.operations / r)),
        "of_roofline": median(lambda s, b, r: s / max(case.num_bytes / b, case.operations / r)),
        "of_sum": median(lambda s, b, r: s / (case.num_bytes / b + case.operations / r)),
    }


def profile(decoder: Decoder, top: int = 30) -> None:
    """Microseconds a step of each kind of operation of the last burst's program."""
    repeats, steps, text = 5, decoder.case.steps, decoder.programs[-1].as_text() or ""
    kinds = {}
    for line in text.splitlines():
        if found := re.match(r'\s*(?:ROOT )?%([\w.\-]+) = (\S+?)[{ ].*op_name="([^"]*)"', line):
            name, shape, operation = found.groups()
            kinds.setdefault(name, (shape, "/".join(operation.split("/")[-3:])))
    decoder()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                decoder()
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        events = collections.defaultdict(list)
        for event in (event for plane in planes for line in plane.lines for event in line.events):
            events[event.name].append(event.duration_ns)
    seconds = collections.Counter()
    for name, durations in events.items():
        if name in kinds and len(durations) >= steps * repeats:
            calls = round(len(durations) / (steps * repeats * decoder.case.bursts))
            seconds[kinds[name]] += statistics.median(durations) / 1e3 * max(1, calls)
    print(f"{decoder.case.name}: {seconds.total():.0f} us in the operations of a step")
    for (shape, operation), microseconds in seconds.most_common(top):
        print(f"{microseconds:9.1f}  {shape:26} {operation}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default="", help="part of the names of the cases to run")
    parser.add_argument("--weights", default="auto", help="formats, separated by commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--cpu_time",
        action="store_true",
        help="time that the thread was running rather than passing: where others use the cores too",
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    devices = configure(1)
    machine = describe_machine(devices)
    cases = [
        replace(case, weights=kept, name=case.name if kept == "auto" else f"{case.name} {kept}")
        for case in CASES
        if args.cases in case.name
        for kept in args.weights.split(",")
    ]
    weights = {(case.config, case.weights): case.policy.init(0) for case in cases}
    decoders = [Decoder(case, weights[case.config, case.weights]) for case in cases]
    if args.profile:
        for decoder in decoders:
            profile(decoder)
        return
    clock = time.process_time if args.cpu_time else time.perf_counter
    results = measure(cases, decoders, args.rounds, clock)
    for name, values in results.items():
        print(name, {key: round(value, 2) for key, value in values.items()})
    if args.out:
        command = "python -m benchmarks.decode_step " + " ".join(sys.argv[1:])
        content = {"command": command, "machine": machine, "cases": results}
        args.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
