"""Decoding on one accelerator against the bytes that must move.

    python -m benchmarks.speed.gpu_decode --out benchmarks/results/gpu_decode.json
    python -m benchmarks.speed.gpu_decode --small            # the same on a CPU, in about a minute

Random bfloat16 weights of a published shape, one layout, `--bursts` bursts behind prompts that differ.
For each batch and context:

    device   the engine's own burst program, called again with what it returns and never waited for in
             between: what the device needs
    wall     `RolloutEngine.rollout` of as many requests, from its first burst to its end: the same
             bursts with the host between them
    host gap 1 - device / wall

Bytes are those that must move in a step: each weight once, and the keys and values of each row's own
tokens. They are held against the bandwidth of the same device: that of its data sheet, and that of
reading a large array (summed, times a vector, or copied: the fastest), measured in each round. A cell
whose cache is more than the device has room for is left out and named. The file is written after each
cell.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import machine, options, write
from benchmarks.speed.engine_vs_peers import SMALL, draw
from pat_jax.common.chips import chip_of
from pat_jax.common.devices import Device, configure
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.sequences.state import DecodeState, ReservedPages, RowState, Until, seen_shape
from pat_jax.engine.sizing.pool_pages import page_bytes
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key

DTYPE = jnp.bfloat16
ALONE = Split(1, 1)
ROOM = 0.9  # of a device's memory, for weights and cache


@dataclass(frozen=True)
class Cell:
    model: str
    config: ModelConfig
    rows: int
    context: int  # tokens of each prompt
    steps: int  # of a burst
    bursts: int

    @property
    def new_tokens(self) -> int:
        return self.steps * self.bursts

    @property
    def step_bytes(self) -> float:
        """That must move in a step, on average: each weight once, each row's own keys and values."""
        config, parameters = self.config, self.num_parameters
        if not config.tie_embeddings:
            parameters -= config.padded_vocab_size * config.embed_dim  # rows are looked up
        of_token = page_bytes(config, 1, DTYPE)
        # The newest token of a prompt comes with the first step.
        context = self.context - 1 + (self.new_tokens + 1) / 2
        return parameters * DTYPE.dtype.itemsize + self.rows * context * of_token

    @property
    def num_parameters(self) -> int:
        policy = Policy.from_config(self.config)
        return sum(leaf.size for leaf in jax.tree.leaves(policy.abstract_params))

    @property
    def held_bytes(self) -> int:
        held = self.rows * (self.context + self.new_tokens) * page_bytes(self.config, 1, DTYPE)
        return self.num_parameters * DTYPE.dtype.itemsize + held


class Decoder:
    """The engine of one cell, with one bucket of rows and one of length: nothing else is compiled."""

    def __init__(self, cell: Cell, devices: Sequence[Device], params: Params):
        config = replace(
            RolloutConfig(),
            max_prompt_length=cell.context,
            max_completion_length=cell.new_tokens,
            burst_steps=cell.steps,
            min_rows=cell.rows,
            page_size=16,
            # One bucket: no program for shorter contexts.
            min_length=-(-(cell.context + cell.new_tokens) // 16) * 16,
        )
        policy = Policy.from_config(cell.config)
        self.cell, self.params = cell, params
        self.engine = RolloutEngine(
            policy, devices, config, capacity=cell.rows, eos_ids=(1,), dtype=DTYPE
        )
        self.engine.compile()
        self.layout = self.engine.layouts[ALONE]
        (self.length,) = self.engine.specs.buckets.lengths

    def device_seconds(self) -> float:
        """Of a step, in bursts that follow one another without the host."""
        cell, split, programs = self.cell, ALONE, self.engine.programs
        program = programs[Key("decode", split, cell.rows, self.length)]
        width = self.engine.specs.width(self.length)
        tables = 1 + np.arange(cell.rows * width, dtype=np.int32).reshape(cell.rows, width)
        rows = RowState.empty(cell.rows)
        rows.running[:], rows.ignore_eos[:] = True, True
        rows.position[:] = cell.context - 1
        rows.end[:] = cell.context + cell.new_tokens
        seen = np.zeros(seen_shape(cell.config, cell.rows), np.uint32)
        nothing = np.zeros(split.dp, np.int32)
        rows, seen, tables, drawn = jax.device_put(
            (rows, seen, tables, nothing), self.layout.sharding("batch")
        )
        state = DecodeState(rows, seen, programs[Key("allocate", split)](), tables, drawn)
        # It never runs out: the tables are full, and rows may run past their ends.
        ring = np.zeros((split.dp, self.engine.specs.shapes.reserve_size(cell.rows)), np.int32)
        reserved = ReservedPages(ring, np.full(split.dp, 2**30, np.int32))
        jax.block_until_ready(state)
        until = Until(np.int32(cell.steps), np.int32(0))
        outputs, start = [], time.perf_counter()
        for _ in range(cell.bursts):
            state, output = program(self.params, state, reserved, until, None)
            outputs.append(output)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - start
        assert sum(int(output.steps) for output in outputs) == cell.new_tokens
        for leaf in jax.tree.leaves(state.pool):
            leaf.delete()
        return seconds / cell.new_tokens

    def wall_seconds(self, seed: int) -> tuple[float, float]:
        """Of a step with the host between the bursts, and of the prefill before them."""
        cell = self.cell
        shape, vocab = (cell.rows, cell.context, cell.new_tokens), cell.config.vocab_size
        batch = draw(seed, *shape, is_heavy=False, vocab=vocab)
        requests = [
            Request(tuple(prompt), sequence_key(seed, i), cell.new_tokens, ignore_eos=True)
            for i, prompt in enumerate(batch.prompts)
        ]
        self.engine.set_weights(self.params, self.layout)
        _, report = self.engine.rollout(requests, FixedLayout(ALONE))
        assert report.decode_steps == cell.new_tokens
        bursts = report.total_s - report.bursts[0].began_s  # from the beginning of the first
        return bursts / cell.new_tokens, report.seconds["prefill"]


def read_bandwidth(num_bytes: int) -> float:
    """Bytes a second that this device moves, the fastest of three ways."""
    array, vector = jnp.ones((num_bytes // 2**14, 2**13), DTYPE), jnp.ones(2**13, DTYPE)
    total, dot, copy = jax.jit(jnp.sum), jax.jit(jnp.matmul), jax.jit(lambda x: x + 1)
    ways: list[tuple[int, Callable[[], jax.Array]]] = [
        (array.nbytes, lambda: total(array)),
        (array.nbytes, lambda: dot(array, vector)),
        (2 * array.nbytes, lambda: copy(array)),  # read and written
    ]
    found = []
    for moved, run in ways:
        jax.block_until_ready(run())
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(run())
            found.append(moved / (time.perf_counter() - start))
    return max(found)


def measure(
    cell: Cell, devices: Sequence[Device], params: Params, rounds: int, read_bytes: int
) -> dict:
    """Medians over rounds; the bandwidth is that of reading `read_bytes`."""
    decoder = Decoder(cell, devices, params)
    found = []
    for nth in range(rounds + 1):
        wall, prefill = decoder.wall_seconds(nth)
        device = decoder.device_seconds()
        # Last: what follows it on a CPU finds its caches and its freed memory cold.
        bandwidth = read_bandwidth(read_bytes)
        if nth:  # the first round warms up
            found.append((device, wall, prefill, bandwidth, cell.step_bytes / device / bandwidth))
    device, wall, prefill, bandwidth, share = map(statistics.median, zip(*found, strict=True))
    chip = chip_of(devices[0].device_kind)
    of_sheet = {"of_data_sheet": cell.step_bytes / device / chip.memory_bytes_s} if chip else {}
    return {
        "device_step_ms": 1e3 * device,
        "wall_step_ms": 1e3 * wall,
        "host_gap": statistics.median(1 - d / w for d, w, *_ in found),
        "tokens_per_s": cell.rows / wall,
        "step_gb": cell.step_bytes / 1e9,
        "bandwidth_gb_s": bandwidth / 1e9,
        "of_bandwidth": share,
        **of_sheet,
        "prefill_tokens_per_s": cell.rows * (cell.context - 1) / prefill,
        "rounds": rounds,
    }


def name_of(cell: Cell) -> str:
    return f"{cell.model} batch {cell.rows} context {cell.context}"


def cells_of(args: argparse.Namespace) -> list[Cell]:
    if args.small:
        shapes, rows, contexts = {"small": SMALL}, (1, 8), (64, 256)
    else:
        shapes = {name: preset(name) for name in args.models}
        rows, contexts = args.batches, args.contexts
    sizes = args.cells or [*product(rows, contexts)]
    return [
        Cell(name, config, n, context, 16 if args.small else 64, args.bursts)
        for name, config in shapes.items()
        for n, context in sizes
    ]


def _cell(text: str) -> tuple[int, int]:
    rows, context = map(int, text.split("x"))
    return rows, context


def parse() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b", "qwen3-14b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192])
    cells = "rows and contexts, such as 64x1024, in place of --batches and --contexts"
    parser.add_argument("--cells", nargs="+", type=_cell, default=[], help=cells)
    parser.add_argument("--bursts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=141, help="GB of the device")
    parser.add_argument("--small", action="store_true", help="a tiny shape, fit for a CPU")
    return parser.parse_args()


def main() -> None:
    args = parse()
    cells = cells_of(args)
    left_out = [cell for cell in cells if cell.held_bytes > ROOM * 1e9 * args.memory]
    cells = [cell for cell in cells if cell not in left_out]
    models = dict.fromkeys(cell.model for cell in cells)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    devices = configure(1)
    about, results = machine(devices), {}
    left = [name_of(cell) for cell in left_out]
    for model in models:
        mine = [cell for cell in cells if cell.model == model]
        params = Policy.from_config(mine[0].config).init(0, dtype=DTYPE)
        for cell in mine:
            found = measure(cell, devices, params, args.rounds, 2**28 if args.small else 2**31)
            results[name_of(cell)] = found
            print(name_of(cell), {k: v for k, v in found.items() if k != "rounds"}, flush=True)
            write(args.out, {"machine": about, "cells": results, "left_out": left})
        for leaf in jax.tree.leaves(params):
            leaf.delete()


if __name__ == "__main__":
    main()
