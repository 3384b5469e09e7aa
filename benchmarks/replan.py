"""How long the host takes to plan anew at a burst: length model, forecast and dynamic program.

    python -m benchmarks.replan --out benchmarks/results/replan.json

`CostModelPlanner.plan` of Llama-3.1-8B composed for eight H100, four layouts, responses of up to 32K
tokens; a length model that knows 16,384 prompts, eight samples of each. All of a rollout's sequences
run, or the last ones; all at one length, as in a synchronous rollout, or each at its own; with the
lengths of their siblings looked at, or without. Milliseconds, alone on a core; the median of many.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.adaptive_vs_static import describe_machine
from benchmarks.kernel_tables import SPLITS
from benchmarks.length_calibration import median_ms
from pat_jax.common.devices import configure
from pat_jax.engine.layout.buckets import Buckets
from pat_jax.models.presets import preset
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import Load, Siblings
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.sources import kernels_for
from pat_jax.profiling.predict.targets import Target

CAP, LONGEST_PROMPT, NOW = 32_768, 1024, 1200  # tokens; NOW: sampled so far
KNOWN_PROMPTS, SAMPLES = 16_384, 8


def learned(prompts: int) -> LengthModel:
    """From one epoch over all prompts, so many in each rollout."""
    model, rng = LengthModel.empty(CAP), np.random.default_rng(0)
    for start in range(0, KNOWN_PROMPTS, prompts):
        of = np.repeat(np.arange(start, start + prompts), SAMPLES)
        lengths = np.minimum(rng.lognormal(7.4, 1.0, len(of)), CAP).astype(int) + 1
        model = model.updated(lengths, lengths >= CAP, of)
    return model


def planner_for(sequences: int) -> CostModelPlanner:
    buckets = Buckets.build(
        SPLITS,
        capacity=sequences,
        min_rows=1,
        min_length=512,
        max_length=LONGEST_PROMPT + CAP,
    )
    kernels = kernels_for(Target.parse("h100:8"))
    latency = Composer(kernels, preset("llama-3.1-8b")).latency_model(buckets)
    return CostModelPlanner(SPLITS, latency, learned(sequences // SAMPLES))


def loads(sequences: int) -> Iterator[tuple[str, Load]]:
    rng = np.random.default_rng(1)
    prompt = np.repeat(np.arange(sequences // SAMPLES), SAMPLES)
    for live in (sequences, sequences // 8):
        order, done = rng.permutation(sequences), rng.integers(1, NOW, sequences - live)
        siblings = Siblings(
            np.arange(sequences // SAMPLES),
            prompt[order[:live]],
            prompt[order[live:]],
            done,
            np.zeros(len(done), bool),
        )
        one, own = np.full(live, NOW), rng.integers(0, 4 * NOW, live)
        for lengths, generated in (("one length", one), ("its own length", own)):
            load = Load(
                np.arange(live) * SPLITS[0].dp // live,
                generated,
                generated + rng.integers(64, 256, live),
                CAP - generated,
                siblings,
            )
            name = f"{live} of {sequences} live, each at {lengths}"
            yield f"{name}, siblings known", load
            yield name, replace(load, siblings=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = {}
    for sequences in args.sequences:
        planner = planner_for(sequences)
        for name, load in loads(sequences):
            found[name] = median_ms(partial(planner.plan, load, SPLITS[0]))
            print(f"{found[name]:7.3f} ms  {name}")
    if args.out:
        content = {
            "command": "python -m benchmarks.replan " + " ".join(sys.argv[1:]),
            "machine": describe_machine(configure(1)),
            "milliseconds": found,
        }
        args.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
