"""How much of a micro-batch is padding, on real response lengths: packed rows, and one example a row.

    python -m benchmarks.padding --data ../shared/data [--out benchmarks/results/padding.json]

Of each set 64 prompts with 8 responses, drawn from the data, in mini-batches of 16 prompts as an
update takes them, with the shapes that a run compiles for that set's longest prompt and response.
The demo's lengths are those of its demonstrations. On the host alone, from lengths.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.workloads import read
from pat_jax.config.command_line import parse
from pat_jax.config.run import RolloutConfig, RunConfig
from pat_jax.engine.layout.buckets import ladder, largest_length, smallest_at_least
from pat_jax.rl.packing import Shape, pack_rows
from pat_jax.run.task import load_task, load_tokenizer
from pat_jax.training.build import micro_shapes

SETS = "math", "gsm", "r1"
PROMPTS, SAMPLES, MINI_BATCH = 64, 8, 16
SHARDS = 1, 8  # of the rows, over devices


def padding(lengths: Sequence[int], shapes: Sequence[Shape]) -> tuple[float, float]:
    """Share of the slots without a token and passes of a mini-batch, over all mini-batches."""
    size = MINI_BATCH * SAMPLES
    minis = [pack_rows(lengths[i : i + size], shapes) for i in range(0, len(lengths), size)]
    passes = [shape for mini in minis for shape in mini.shapes]
    slots = sum(rows * length for rows, length in passes)
    return 1 - sum(lengths) / slots, len(passes) / len(minis)


def length_buckets(config: RunConfig) -> tuple[int, ...]:
    limits = config.rollout
    return ladder(limits.min_length, largest_length(limits.max_length, limits.min_length))


def bucketed(lengths: Sequence[int], config: RunConfig, shards: int) -> tuple[float, float]:
    """The same of one example a row, in the shortest of the run's length buckets that holds it."""
    buckets, budget = length_buckets(config), config.algorithm.tokens_per_micro_batch
    size, slots, passes = MINI_BATCH * SAMPLES, 0, 0
    for i in range(0, len(lengths), size):
        rest = sorted(lengths[i : i + size], reverse=True)
        while rest:
            length = smallest_at_least(buckets, rest[0])
            rows = max(shards, budget // length // shards * shards)
            rest, slots, passes = rest[rows:], slots + rows * length, passes + 1
    return 1 - sum(lengths) / slots, passes / (len(lengths) / size)


def cases(data: Path) -> Iterator[tuple[str, RunConfig, list[int]]]:
    """Name, options and the lengths of examples, prompt and response."""
    config = parse(["--run_dir", "unused"])
    task = load_task(config, load_tokenizer(config))
    assert task.demonstrations is not None
    shown = task.demonstrations(0, PROMPTS * SAMPLES)
    yield "demo", config, [len(prompt) + len(response) for prompt, response in shown]
    known = read(data)
    for name in SETS:
        drawn = known[name].sample(PROMPTS * SAMPLES, seed=0)
        rollout = replace(
            RolloutConfig(),
            max_prompt_length=int(known[name].max_prompt),
            max_completion_length=known[name].cap,
        )
        yield name, RunConfig(rollout=rollout), (drawn.prompts + drawn.responses).tolist()


def measure(name: str, config: RunConfig, lengths: list[int], shards: int) -> dict[str, Any]:
    shapes = micro_shapes(config, shards)
    (now, passes), (before, passes_before) = (
        padding(lengths, shapes),
        bucketed(lengths, config, shards),
    )
    return {
        "lengths": name,
        "shards": shards,
        "shapes": shapes,
        "shapes_one_a_row": len(length_buckets(config)),
        "padding": round(now, 4),
        "padding_one_a_row": round(before, 4),
        "passes": passes,
        "passes_one_a_row": passes_before,
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
