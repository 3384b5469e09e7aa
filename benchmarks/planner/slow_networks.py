"""PPO on two hosts with a slow network between them: parameters divided over both, or inside each, or
policy and reference on one host, critic and reward model on the other.

    python -m benchmarks.planner.slow_networks --out benchmarks/results/slow_networks.json

Policy, critic, reference and reward model of 8B on two hosts of eight H100s, 2,048 responses of up to
16,384 tokens, one optimizer step an iteration, models waiting on devices. All seconds are computed:
nothing ran. Scores and updates are what each model reads and learns after the rollout; the rollout is
the same in all. The last is `--placement split` with two processes on each host.
"""

from pathlib import Path

from benchmarks.report import options, write
from pat_jax.commands.plan import question_of
from pat_jax.config.command_line import parse
from pat_jax.planning.placement import PlacedRole, Placement, Positions
from pat_jax.planning.stage_names import ROLLOUT
from pat_jax.profiling.capacity.placing import Placing
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.question import Question
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.placement.schedule import scheduled

MODEL, HOST = "qwen3-8b", 8  # devices of a host
RATES = (3200, 800, 400, 200, 100)  # Gb/s of a host
ASKED = f"""
    --model {MODEL} --responses 2048 --max_completion_length 16384
    --algorithm.name ppo --beta 0.05 --critic.model {MODEL} --reward model:{MODEL}
    --algorithm.whiten_advantages false --speculation.source none --compile false --rollouts 1
    --placement auto --roles.rest device --sums one-shot
"""


def question(data: Path, gigabits: int, fsdp_size: int) -> Question:
    """The plan of such a run with a network of so many Gb/s for each host."""
    asked = f"{ASKED} --target h100:{HOST}x2@{gigabits} --data {data} --fsdp_size {fsdp_size}"
    return question_of(parse(asked.split(), PlanConfig, prog="plan", presets=None), "")


def flatten(asked: Question) -> tuple[Placing, Candidate]:
    """All models on all devices."""
    placing = Placing(asked)
    return placing, placing.candidates[0]


def by_hosts(asked: Question) -> tuple[Placing, Candidate]:
    """Policy and reference on one host, critic and reward model on the other, rollouts on both."""
    every = tuple(range(2 * HOST))
    first, second = every[:HOST], every[HOST:]
    places: dict[PlacedRole, Positions] = {"rollout": every, "policy": first, "teacher": first}
    places |= {"reference": first, "critic": second, "reward": second}
    return Placing(asked, cuts=1), Candidate(Placement(places))


def seconds(placing: Placing, one: Candidate) -> tuple[dict[str, float], float]:
    """Seconds of each stage of an iteration, and of all that follows the rollout."""
    iterations = placing.iterations(one)
    assert not isinstance(iterations, str), iterations
    found = scheduled(iterations[0])
    stages = {span.name: span.busy_s for span in found.spans}
    return stages, found.seconds - stages[ROLLOUT]


def main() -> None:
    args = options(__doc__, has_data=True).parse_args()
    found = {}
    for rate in RATES:
        every = {
            "0": flatten(question(args.data, rate, 0)),
            str(HOST): flatten(question(args.data, rate, HOST)),
            "a host for two models": by_hosts(question(args.data, rate, 0)),
        }
        priced = {name: seconds(*each) for name, each in every.items()}
        after = {name: after_s for name, (_, after_s) in priced.items()}
        total = {name: stages[ROLLOUT] + after[name] for name, (stages, _) in priced.items()}
        found[f"{rate} Gb/s"] = {
            "stages_s": {name: stages for name, (stages, _) in priced.items()},
            "scores_and_updates_s": after,
            "scores_and_updates": after["0"] / after[str(HOST)],
            "iteration": total["0"] / total[str(HOST)],
        }
        print(f"{rate} Gb/s: {after}", flush=True)
    write(args.out, {"what": __doc__, "rates": found})


if __name__ == "__main__":
    main()
