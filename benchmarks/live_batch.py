"""Does the time of a decode step follow the live sequences, and what does the KV cache hold in vain?

    python -m benchmarks.live_batch --out benchmarks/results/live_batch_cpu.json

On one CPU device. One engine of `--capacity` rows decodes with 1, 2, 3 … sequences live; beside it, by
turns, an engine made for exactly so many. The ratio of their step times is what row buckets cost. Then
one rollout with heavy-tailed lengths: its decode time over what its steps would have taken in engines
made for the sequences live at each. Of the same rollout: KV memory held and not used (averaged over the
beginnings and ends of bursts), and prefill computed in vain.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from benchmarks.adaptive_vs_static import describe_machine
from benchmarks.decode_step import SMALL, Case, Decoder, engine_for
from benchmarks.engine_vs_peers import heavy_lengths
from pat_jax.common.devices import configure
from pat_jax.engine.device.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.responses import Request
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.planning.planner.scripts import FixedLayout


def by_live(case: Case, engine: RolloutEngine, weights: Params, rounds: int) -> dict[int, dict]:
    """Milliseconds a step with each number of live sequences."""
    found = {}
    for live in range(1, case.rows + 1):
        alive = replace(case, rows=live)
        shared, exact = Decoder(alive, weights, engine), Decoder(alive, weights)
        # The first round warms up.
        pairs = [(shared(), exact()) for _ in range(rounds + 1)][1:]
        steps = case.steps * case.bursts
        found[live] = {
            "step_ms": 1e3 * statistics.median(ours for ours, _ in pairs) / steps,
            "made_for_it_ms": 1e3 * statistics.median(exact for _, exact in pairs) / steps,
            "ratio": statistics.median(ours / exact for ours, exact in pairs),
        }
        print(live, {name: round(value, 3) for name, value in found[live].items()})
    return found


def rollout(
    case: Case, engine: RolloutEngine, weights: Params, steps_ms: dict[int, float], rounds: int
) -> dict[str, float]:
    """One rollout of heavy-tailed lengths against the pace of engines made for what is live."""
    rng = np.random.default_rng(0)
    lengths = heavy_lengths(rng, case.rows, case.steps * case.bursts)
    requests = [
        Request(
            tuple(rng.integers(0, case.config.vocab_size, case.prompt).tolist()),
            sequence_key(0, i),
            length,
            ignore_eos=True,
        )
        for i, length in enumerate(lengths.tolist())
    ]
    ideal_s = sum(steps_ms[int((lengths > step).sum())] for step in range(lengths.max())) / 1e3
    (layout,) = engine.layouts.values()
    ratios = []
    for _ in range(rounds + 1):
        placed = jax.device_put(weights, layout.param_shardings(engine.policy))
        engine.set_weights(jax.tree.map(lambda x: x.copy(), placed), layout)
        _, report = engine.rollout(requests, FixedLayout(layout.split))
        engine.release_weights()
        ratios.append(report.seconds["decode"] / ideal_s)
    return {
        "decode_over_ideal": statistics.median(ratios[1:]),
        "row_occupancy": report.busy_rows / report.total_rows,
        "kv_waste": report.kv_waste,
        "prefill_padding": report.prefill_padding,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="small", help="small (2.5 M), or a preset")
    parser.add_argument("--capacity", type=int, default=16, help="rows of the engine")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of every prompt")
    parser.add_argument("--new_tokens", type=int, default=128, help="of the longest response")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = describe_machine(configure(1))
    config = SMALL if args.model == "small" else preset(args.model)
    steps = min(args.new_tokens, 64)
    case = Case("", config, args.capacity, args.prompt, steps, args.new_tokens // steps)
    weights = Policy.from_config(config).init(0)
    engine = engine_for(case, args.capacity, min_rows=1)
    steps_ms = by_live(case, engine, weights, args.rounds)
    exact = {live: values["made_for_it_ms"] for live, values in steps_ms.items()}
    whole = rollout(case, engine, weights, exact, args.rounds)
    print({name: round(value, 3) for name, value in whole.items()})
    if args.out:
        command = "python -m benchmarks.live_batch " + " ".join(sys.argv[1:])
        content = {"command": command, "machine": machine, "live": steps_ms, "rollout": whole}
        args.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
