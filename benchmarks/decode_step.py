"""A decode step on one CPU device against what its bytes and its arithmetic need on that core.

    python -m benchmarks.decode_step --out benchmarks/results/decode_step_cpu.json

Float32 (`--weights auto,int8`: with weights kept in each of these), one compute thread. A case generates behind
prompts of equal length with the engine's own programs, and its decode bursts are timed. In each round the
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
from pat_jax.common.devices import configure
from pat_jax.common.stopwatch import Stopwatch
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.controller import Controller
from pat_jax.engine.device.programs import Key
from pat_jax.engine.device.sampling import sequence_key
from pat_jax.engine.device.weights import Weights
from pat_jax.engine.device_executor import DeviceExecutor
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.responses import Request, Responses
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.planning.types import Plan

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


def engine_for(case: Case, capacity: int, min_rows: int) -> RolloutEngine:
    """Compiled, on one device, with room for `capacity` sequences of a case."""
    config = replace(
        RolloutConfig(),
        max_prompt_length=case.prompt,
        max_completion_length=case.steps * case.bursts,
        burst_steps=case.steps,
        min_rows=min_rows,
    )
    engine = RolloutEngine(case.policy, jax.devices(), config, capacity=capacity, eos_ids=())
    engine.compile()
    return engine


class Decoder:
    """One case on the engine's own programs; calling it generates behind the prompts once."""

    def __init__(self, case: Case, weights: Params, engine: RolloutEngine | None = None):
        self.case, self.weights = case, weights
        self.engine = engine or engine_for(case, case.rows, case.rows)
        (self.layout,) = self.engine.layouts.values()
        rng = np.random.default_rng(0)
        self.requests = [
            Request(
                tuple(rng.integers(0, case.config.vocab_size, case.prompt).tolist()),
                sequence_key(0, row),
                case.steps * case.bursts,
                ignore_eos=True,
            )
            for row in range(case.rows)
        ]

    def __call__(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds of all decode steps: from each burst's dispatch to its end."""
        specs, programs, split = self.engine.specs, self.engine.programs, self.layout.split
        rows, seconds = specs.buckets.rows[split][-1], 0.0
        responses = Responses.of(self.requests, num_groups=split.dp, rows_per_group=rows)
        controller = Controller(responses, specs.shapes, split, runs_ahead=False)
        weights = Weights(specs, programs, self.weights, self.layout)
        tables = controller.scheduler.tables
        executor = DeviceExecutor(specs, programs, weights, responses, tables, Stopwatch())
        executor.prefill(controller.admit())
        while controller.has_work:
            controller.fit()
            start = clock()
            executor.launch(controller.burst(Plan(split, threshold=0)))
            jax.block_until_ready(executor.pool.pages)
            seconds += clock() - start
            controller.collect(executor.collect()[0])
        executor.release()
        return seconds

    @property
    def text(self) -> str:
        """The compiled program of the last burst."""
        split, rows = self.layout.split, self.case.rows
        length = self.engine.specs.buckets.lengths[-1]
        return self.engine.programs[Key("decode", split, rows, length)].as_text()


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
            seconds = min(decoder(clock) for _ in range(3)) / (case.steps * case.bursts)
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
    repeats, steps, text = 5, decoder.case.steps, decoder.text
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
