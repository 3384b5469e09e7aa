"""PPO on two hosts with a slow network between them: parameters divided over both, or inside each.

    python -m benchmarks.planner.slow_networks --out benchmarks/results/slow_networks.json

Policy, critic, reference and reward model of 8B on two hosts of eight H100s, 2,048 responses of up to
16,384 tokens, one optimizer step an iteration, models waiting on devices. All seconds are computed:
nothing ran. They are those of what each model reads and learns after the rollout, and of the transfer; the
rollout is the same in both.
"""

from benchmarks.report import options, write
from pat_jax.commands.plan import question_of
from pat_jax.config.command_line import parse
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.report import Update
from pat_jax.profiling.capacity.tables import stage_seconds
from pat_jax.profiling.capacity.update import PlannedUpdate

MODEL, HOST = "qwen3-8b", 8  # devices of a host
RATES = (3200, 800, 400, 200, 100)  # Gb/s of a host
ASKED = f"""
    --model {MODEL} --responses 2048 --max_completion_length 16384
    --algorithm.name ppo --beta 0.05 --critic.model {MODEL} --reward model:{MODEL}
    --speculation.source none --compile false --rollouts 1 --roles.rest device --sums one-shot
"""


def update(gigabits: int, fsdp_size: int) -> Update:
    """The updates of such a run with a network of so many Gb/s for each host."""
    asked = f"{ASKED} --target h100:{HOST}x2@{gigabits} --fsdp_size {fsdp_size}"
    question = question_of(parse(asked.split(), PlanConfig, prog="plan", presets=None), "")
    workload = question.series.workload(question.lengths, 0)
    updating = PlannedUpdate(question.build, (), question.options.memory_options)
    return updating.of([workload], next(iter(question.build.layouts)))


def main() -> None:
    args = options(__doc__).parse_args()
    found = {}
    for rate in RATES:
        both = {str(size): update(rate, size) for size in (0, HOST)}
        after_s = {name: one.total_s for name, one in both.items()}
        stages_s = {
            name: {what: seconds.total for what, seconds in stage_seconds(one).items()}
            for name, one in both.items()
        }
        found[f"{rate} Gb/s"] = {
            "stages_s": stages_s,
            "scores_and_updates_s": after_s,
            "scores_and_updates": after_s["0"] / after_s[str(HOST)],
        }
        print(f"{rate} Gb/s: {after_s}", flush=True)
    write(args.out, {"what": __doc__, "rates": found})


if __name__ == "__main__":
    main()
