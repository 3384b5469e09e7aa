"""PPO on two hosts with a slow network between them: parameters divided over both, or inside each.

    python -m benchmarks.planner.slow_networks --out benchmarks/results/slow_networks.json

Policy, critic, reference and reward model of 8B on two hosts of eight H100s, 2,048 responses of up to
16,384 tokens, one optimizer step an iteration, models waiting on devices. All seconds are computed:
nothing ran. Scores and updates are what each model reads and learns after the rollout; the rollout is
the same in both.
"""

from pathlib import Path

from benchmarks.report import options, write
from pat_jax.commands.plan import question_of
from pat_jax.config.command_line import parse
from pat_jax.planning.stage_names import ROLLOUT
from pat_jax.profiling.capacity.placing import Placing
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.question import Question
from pat_jax.profiling.placement.schedule import scheduled

MODEL, HOST = "qwen3-8b", 8  # devices of a host
RATES = (3200, 800, 400, 200, 100)  # Gb/s of a host
ASKED = f"""
    --model {MODEL} --responses 2048 --max_completion_length 16384
    --algorithm.name ppo --beta 0.05 --critic.model {MODEL} --reward model:{MODEL}
    --algorithm.whiten_advantages false --speculation.source none --compile false --rollouts 1
    --placement auto --roles.rest device
"""


def question(data: Path, gigabits: int, fsdp_size: int) -> Question:
    """The plan of such a run with a network of so many Gb/s for each host."""
    asked = f"{ASKED} --target h100:{HOST}x2@{gigabits} --data {data} --fsdp_size {fsdp_size}"
    return question_of(parse(asked.split(), PlanConfig, prog="plan", presets=None), "")


def seconds(data: Path, gigabits: int, fsdp_size: int) -> dict[str, float]:
    """Seconds of each stage of an iteration with all models on all devices."""
    placing = Placing(question(data, gigabits, fsdp_size))
    iterations = placing.iterations(placing.candidates[0])
    assert not isinstance(iterations, str), iterations
    return {span.name: span.busy_s for span in scheduled(iterations[0]).spans}


def main() -> None:
    args = options(__doc__, has_data=True).parse_args()
    found = {}
    for rate in RATES:
        stages = {str(size): seconds(args.data, rate, size) for size in (0, HOST)}
        after = {size: sum(x.values()) - x[ROLLOUT] for size, x in stages.items()}
        found[f"{rate} Gb/s"] = {
            "stages_s": stages,
            "scores_and_updates_s": after,
            "scores_and_updates": after["0"] / after[str(HOST)],
            "iteration": sum(stages["0"].values()) / sum(stages[str(HOST)].values()),
        }
        print(f"{rate} Gb/s: {found[f'{rate} Gb/s']}", flush=True)
    write(args.out, {"what": __doc__, "rates": found})


if __name__ == "__main__":
    main()
