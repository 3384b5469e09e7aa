"""Where each model of PPO lives, measured on two cores and predicted: seconds of an iteration.

    python -m benchmarks.planner.placement_two_cores --out benchmarks/results/placement_two_cores.json

Policy, critic, reference and reward model of one size with random weights; one optimizer step an iteration,
strictly on-policy. `flatten` is one process with both cores, as one device or as two, whichever is faster;
`separate` is two processes with a core each (`two_core_runs.py`). Response lengths are forced: some are
many times as long as most. All placements take turns, iteration by iteration.

Predicted are the same iterations from what is measured while warming up: decode steps, by which the rollout
is replayed; seconds of each pass; their order by the planner. `given_rollout` takes the rollout of the
warm-up in place of the replay. The choice is the planner's rule for measured prices.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.planner.two_core_case import Case
from benchmarks.planner.two_core_processes import FLATTEN, OVERLAPS, SEPARATE, Systems
from benchmarks.planner.two_core_runs import Turn
from benchmarks.planner.two_core_tables import Tables
from benchmarks.report import by_turns, machine, median_interval, options, write
from benchmarks.speed.engine_vs_peers import SMALL
from pat_jax.common.devices import CACHE_DIR
from pat_jax.models.presets import preset
from pat_jax.planning.placement import Placement
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.placement.priced import ERROR, PartMemory, Placements, Priced

CANDIDATES = {FLATTEN: Candidate(Placement.named("flatten", 2))} | {
    name: Candidate(Placement.named("separate", 2), overlap) for overlap, name in SEPARATE.items()
}
FEWER = "--rollout.min_rows 8 --rollout.min_length 256"  # programs: they compile in minutes
CASES = {
    "64 responses a core": Case(SMALL, 128, 24.0, 1.2, 1024, more=FEWER),
    "8 responses a core": Case(SMALL, 16, 64.0, 1.2, 1024, more=FEWER),
}
TINY = Case(
    *(replace(preset("tiny"), num_layers=1), 4, 10.0, 0.8, 40),
    micro_batch=64,
    compiles="needed",
    more="--rollout.min_length 64 --rollout.prefill_blocks 16",
)


def predicted(systems: Systems, case: Case) -> dict[str, Any]:
    """The seconds of each placement by a replayed rollout, and by that of the warm-up; and tables."""
    alone, apart = systems.flat[FLATTEN]("tables"), systems.apart("tables")
    none = SEPARATE["none"]
    clock, seconds = systems.clock(none), systems.seconds(none)
    last = systems.seen[none][-1]
    ended_s = np.array(last.ended_s) * clock["rollout"] / last.clock["rollout"]
    ways = {
        "replayed": (case.workload(), (apart["rollout_s"], apart["ended_s"])),
        "given_rollout": (case.workload(last.lengths), (clock["rollout"], ended_s.tolist())),
    }
    whole, stages = systems.seconds(FLATTEN), systems.clock(FLATTEN)
    found: dict[str, Any] = {
        "replayed": {FLATTEN: whole - stages["rollout"] + alone["rollout_s"]},
        "given_rollout": {FLATTEN: whole},
    }
    for way, (workload, rollout) in ways.items():
        tables = Tables.of(workload, rollout, apart["passes"], seconds, clock)
        for overlap in OVERLAPS:
            found[way][SEPARATE[overlap]] = tables.predicted(overlap).seconds
    tables = {"passes": asdict(apart["passes"]), none: clock, FLATTEN: stages}
    replays = {FLATTEN: alone["rollout_s"], none: apart["rollout_s"]}
    return {**found, "tables": {**tables, "replayed_rollout_s": replays}}


def choice(seconds: Mapping[str, float]) -> Placements:
    """The planner's choice among placements with these predicted seconds."""
    priced = []
    for name, candidate in CANDIDATES.items():
        memory = tuple(PartMemory(part, "update", 0) for part in candidate.placement.groups())
        priced.append(Priced(name, memory, candidate, seconds[name]))
    return Placements(tuple(priced), ERROR, streams_gradients=True, num_considered=len(priced))


def hidden(turns: Sequence[Turn], reward_s: float) -> dict[str, Any]:
    """How long the passes without gradients took while others were generated, how long an iteration
    waited for them after its last response, and the share that it did not wait for.

    Args:
      reward_s: seconds of the reward model's passes, which no metric has.
    """
    early_s = median(turn.measured["reward/early_seconds"] for turn in turns)
    early_waited_s = median(turn.measured["reward/early_waited_seconds"] for turn in turns)
    waited_s = median(turn.clock["reward"] for turn in turns)
    return {
        "seconds": early_s + reward_s,
        "waited_s": waited_s,
        "share": 1 - waited_s / (early_s + reward_s),
        "without_reward_model": {
            "seconds": early_s,
            "waited_s": early_waited_s,
            "share": 1 - early_waited_s / early_s,
        },
    }


def summary(seen: Mapping[str, Sequence[Turn]], known: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured beside what was predicted."""
    rng = np.random.default_rng(0)
    taken = {name: median_interval([x.seconds for x in turns], rng) for name, turns in seen.items()}
    chosen, fastest = choice(known["replayed"]), min(taken, key=lambda name: taken[name][0])
    errors = {
        f"predicted_{way}": {
            name: {"seconds": s, "error": s / taken[name][0] - 1} for name, s in known[way].items()
        }
        for way in ("replayed", "given_rollout")
    }
    stages = {
        name: {stage: median(x.clock[stage] for x in turns) for stage in turns[0].clock}
        for name, turns in seen.items()
    }
    return {
        "measured_s": {
            name: dict(zip(("median", "low", "high"), x, strict=True)) for name, x in taken.items()
        },
        **errors,
        "chosen": chosen.chosen.name,
        "reason": chosen.reason,
        "fastest": fastest,
        "chosen_over_fastest": taken[chosen.chosen.name][0] / taken[fastest][0] - 1,
        "hidden": hidden(seen[SEPARATE["scores"]], known["tables"][SEPARATE["none"]]["reward"]),
        # Of log-probabilities: whether the policy that is trained has sampled the responses.
        "behavior_gap": max(x.measured["train/behavior_gap"] for x in seen[SEPARATE["none"]]),
        "stages_s": stages,
        "iterations_s": {name: [x.seconds for x in turns] for name, turns in seen.items()},
        "tables": known["tables"],
    }


def measured(
    case: Case, cache: Path, devices: Sequence[int], rounds: int, warm_up: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        systems = Systems(case, Path(folder), cache, devices)
        try:
            by_turns(systems.by_name(), range(warm_up))
            flatten = systems.settle()
            known = predicted(systems, case)
            by_turns(systems.by_name(), range(rounds))
        finally:
            systems.end()
    seen = {name: turns[-rounds:] for name, turns in systems.seen.items()}
    lengths = sorted(case.lengths(0).tolist())
    return {"lengths": lengths, "flatten_s": flatten, **summary(seen, known)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="iterations of each placement")
    parser.add_argument("--warm_up", type=int, default=3, help="iterations before these")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[1, 2], help="of flatten: the fastest is measured"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model and few responses")
    cache = CACHE_DIR.parent / "two_cores"
    parser.add_argument("--cache", type=Path, default=cache, help="folder of compiled programs")
    args = parser.parse_args()
    cases = {"small": TINY} if args.small else {name: CASES[name] for name in args.cases}
    about, found = machine(), {}
    for name, case in cases.items():
        devices = [1] if args.small else args.devices
        found[name] = measured(case, args.cache, devices, args.rounds, args.warm_up)
        print(name, json.dumps(found[name], indent=1))
        write(args.out, {"machine": about, "workloads": found})


if __name__ == "__main__":
    main()
