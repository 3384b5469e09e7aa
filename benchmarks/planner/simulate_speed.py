"""How long it takes to replay one iteration of training, the planner included.

    python -m benchmarks.planner.simulate_speed --out benchmarks/results/simulate_speed.json

One rollout of 2,048 responses of up to 24,576 tokens (Llama-3.1-8B composed for eight H100, the
built-in length distribution `reasoning`, eight samples of a prompt), under the planner that ships,
with every sequence's pages and with as many as a device has. Seconds of this machine; the median of
several runs.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from benchmarks.report import machine, options, write
from pat_jax.common.devices import configure
from pat_jax.config.programs import program_choice
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.models.presets import preset
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.profiling.capacity.costs import costs_of
from pat_jax.profiling.capacity.plan_config import PlanConfig, PlannedRollout
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.cross_compile.target_build import Order
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.draw import Draw
from pat_jax.profiling.simulate.machine import Machine
from pat_jax.profiling.simulate.response_lengths import ResponseLengths
from pat_jax.profiling.simulate.simulator import replay

TARGET, MODEL = "h100:8", "llama-3.1-8b"


def machine_of(sequences: int, cap: int, target: Target) -> Machine:
    model, platform = preset(MODEL), target.chip.platform
    asked = PlanConfig(
        target=target.text,
        responses=sequences,
        rollout=PlannedRollout(max_completion_length=cap),
        speculation=SpeculationConfig("none"),
    )
    config, _ = asked.settled(model.max_position)
    run = program_choice(config, num_layers=model.num_layers, platform=platform)
    build = by_arithmetic(Order.of(target, run, model, (2, 4)))
    costs = costs_of(build, None, "one-shot")
    return Machine.of(
        costs.latency,
        tuple(build.layouts),
        run.rollout,
        capacity=sequences,
        memory=build.memory,
        runs_ahead=True,
    )


def seconds(work: Callable[[], object], runs: int) -> list[float]:
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        found.append(round(time.perf_counter() - start, 3))
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sequences", type=int, default=2048)
    parser.add_argument("--cap", type=int, default=24_576)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    configure(0)
    pooled = machine_of(args.sequences, args.cap, Target.parse(TARGET))
    lengths = ResponseLengths.built_in("reasoning")
    seen, workload = (lengths.draw(Draw(args.sequences, args.cap, seed=i)) for i in range(2))
    learned = LengthModel.empty(args.cap).updated(
        seen.responses, seen.responses >= seen.cap, seen.prompt_id
    )

    def planner() -> Planner:
        return CostModelPlanner(pooled.splits, pooled.truth, learned, memory=pooled.memory)

    endless = replace(pooled, memory=None)
    found = {
        "adaptive": seconds(lambda: replay(workload, planner(), endless), args.runs),
        "adaptive, pools": seconds(lambda: replay(workload, planner(), pooled), args.runs),
    }
    done = replay(workload, planner(), pooled)
    for name, times in found.items():
        print(f"{name:>16} {median(times):6.3f} s (of {times})")
    write(
        args.out,
        {
            "machine": machine(),
            "sequences": args.sequences,
            "cap": args.cap,
            "bursts": len(done.bursts),
            "decode_steps": done.trace.total_steps,
            "simulated_seconds": round(done.total_s, 1),
            "median_seconds": {name: median(times) for name, times in found.items()},
            "seconds": found,
        },
    )


if __name__ == "__main__":
    main()
