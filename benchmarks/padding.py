"""How much of a micro-batch is padding, on real response lengths, and what sharing prompts saves.

    python -m benchmarks.padding --data ../shared/data [--out benchmarks/results/padding.json]

Of each set 64 prompts with 8 responses, drawn from the data, in mini-batches of 16 prompts as an
update takes them, with the shapes that a run compiles for that set's longest prompt and response: rows
whose responses share prompts, rows that share nothing, and one example a row. A group has the prompt of
the first response that is drawn for it. The demo's lengths are those of its demonstrations. On the
host alone, from lengths.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import read
from pat_jax.config.command_line import parse
from pat_jax.config.run import RolloutConfig, RunConfig
from pat_jax.engine.layout.buckets import ladder, largest_length, smallest_at_least
from pat_jax.profiling.capacity.update_batches import Packed
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.rl.packing import Shape
from pat_jax.run.task import load_task, load_tokenizer
from pat_jax.training.build import micro_shapes

SETS = "math", "gsm", "r1"
PROMPTS, SAMPLES, MINI_BATCH = 64, 8, 16
SHARDS = 1, 8  # of the rows, over devices


@dataclass(frozen=True)
class Update:
    """What is computed for all mini-batches."""

    tokens: int
    slots: int  # tokens and padding
    passes: float  # of a mini-batch

    @property
    def padding(self) -> float:
        return 1 - self.tokens / self.slots


def packed(
    prompts: np.ndarray, responses: np.ndarray, shapes: Sequence[Shape], *, is_shared: bool
) -> Update:
    work = Workload(prompts, responses, int(responses.max()), np.arange(len(prompts)) // SAMPLES)
    size = MINI_BATCH * SAMPLES
    found = Packed.of(work, size, shapes, 1, shares_prompts=is_shared)
    tokens = int((prompts + responses).sum()) - sum(found.shared)
    return Update(tokens, found.slots, len(found.shapes) * size / len(prompts))


def length_buckets(config: RunConfig) -> tuple[int, ...]:
    limits = config.rollout
    return ladder(limits.min_length, largest_length(limits.max_length, limits.min_length))


def bucketed(lengths: Sequence[int], config: RunConfig, shards: int) -> Update:
    """One example a row, in the shortest of the run's length buckets that holds it."""
    buckets, budget = length_buckets(config), config.algorithm.tokens_per_micro_batch
    size, slots, passes = MINI_BATCH * SAMPLES, 0, 0
    for i in range(0, len(lengths), size):
        rest = sorted(lengths[i : i + size], reverse=True)
        while rest:
            length = smallest_at_least(buckets, rest[0])
            rows = max(shards, budget // length // shards * shards)
            rest, slots, passes = rest[rows:], slots + rows * length, passes + 1
    return Update(sum(lengths), slots, passes / (len(lengths) / size))


def cases(data: Path) -> Iterator[tuple[str, RunConfig, np.ndarray, np.ndarray]]:
    """Name, options, and the lengths of prompts and responses."""
    config = parse(["--run_dir", "unused"])
    task = load_task(config, load_tokenizer(config))
    assert task.demonstrations is not None
    shown = task.demonstrations(0, PROMPTS * SAMPLES)
    prompts, responses = np.array([[len(part) for part in one] for one in shown]).T
    yield "demo", config, of_groups(prompts), responses
    known = read(data)
    for name in SETS:
        drawn = known[name].sample(PROMPTS * SAMPLES, seed=0)
        rollout = replace(
            RolloutConfig(),
            max_prompt_length=int(known[name].max_prompt),
            max_completion_length=known[name].cap,
        )
        yield name, RunConfig(rollout=rollout), of_groups(drawn.prompts), drawn.responses


def of_groups(prompts: np.ndarray) -> np.ndarray:
    return np.repeat(prompts[::SAMPLES], SAMPLES)


def measure(
    name: str, config: RunConfig, prompts: np.ndarray, responses: np.ndarray, shards: int
) -> dict[str, Any]:
    asked = {
        is_shared: replace(config, algorithm=replace(config.algorithm, share_prompts=is_shared))
        for is_shared in (True, False)
    }
    shapes = {way: micro_shapes(each, shards, "cpu") for way, each in asked.items()}
    shared, apart = (packed(prompts, responses, shapes[way], is_shared=way) for way in asked)
    before = bucketed((prompts + responses).tolist(), config, shards)
    return {
        "lengths": name,
        "shards": shards,
        "prompts": round(float(prompts.sum() / (prompts + responses).sum()), 4),
        "shapes": shapes[True],
        "shapes_apart": shapes[False],
        "shapes_one_a_row": len(length_buckets(config)),
        "tokens": shared.tokens,
        "tokens_apart": apart.tokens,
        "slots": shared.slots,
        "slots_apart": apart.slots,
        "padding": round(shared.padding, 4),
        "padding_apart": round(apart.padding, 4),
        "padding_one_a_row": round(before.padding, 4),
        "passes": shared.passes,
        "passes_apart": apart.passes,
        "passes_one_a_row": before.passes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = [measure(*case, shards) for case in cases(args.data) for shards in SHARDS]
    for result in results:
        print(result)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
