"""Where each model of PPO lives: what the chosen placement gains over flatten, replayed.

    python -m benchmarks.planner.placement_gains --out benchmarks/results/placement_gains.json

Policy, critic, reference and reward model of one size on H100s; one optimizer step an iteration,
gradients that need no whitening, no drafts. All seconds are computed: nothing ran. Rollouts are
replayed on each number of devices, passes are composed. `--wrong` passes take so many times as long as
the choice believed. A file that is there is added to, a setting at a time.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.report import options, write
from pat_jax.commands.plan import question_of
from pat_jax.config.command_line import parse
from pat_jax.profiling.capacity.placing import Placing
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.placement.iteration import Iteration
from pat_jax.profiling.placement.schedule import scheduled

TARGETS = {4: "h100:4", 8: "h100:8", 16: "h100:8x2", 32: "h100:8x4"}
STREAMED = "separate, gradients"
CAPS = {"reasoning": 16_384, "math": 4096}


@dataclass(frozen=True)
class Setting:
    model: str
    devices: int
    responses: int
    lengths: str

    def __str__(self) -> str:
        return f"{self.model}, {self.devices}, {self.responses}, {self.lengths}"

    @property
    def of_a_device(self) -> float:
        return self.responses / self.devices

    def config(self, data: Path) -> PlanConfig:
        named = (
            f"--model {self.model} --target {TARGETS[self.devices]} --responses {self.responses}"
        )
        ppo = f"--algorithm.name ppo --beta 0.05 --critic.model {self.model} --reward model:{self.model}"
        rest = (
            f"--lengths {self.lengths} --max_completion_length {CAPS[self.lengths]} --data {data}"
        )
        fixed = "--algorithm.whiten_advantages false --speculation.source none --compile false --rollouts 1 --sums one-shot"
        asked = f"{named} {ppo} {rest} {fixed} --placement auto"
        return parse(asked.split(), PlanConfig, prog="plan", presets=None)


def with_passes(iteration: Iteration, times: float) -> Iteration:
    """`iteration` with passes that take so many times as long."""
    stages = (
        replace(stage, seconds=tuple(times * x for x in stage.seconds))
        for stage in iteration.stages
    )
    return replace(iteration, stages=tuple(stages))


def without(iteration: Iteration, name: str) -> Iteration:
    """`iteration` without one of its stages."""
    stages = (
        replace(stage, needs=tuple(x for x in stage.needs if x != name))
        for stage in iteration.stages
        if stage.name != name
    )
    return replace(iteration, stages=tuple(stages))


def speed_up(
    placing: Placing,
    one: Candidate | None,
    changed: Callable[[Iteration], Iteration],
    halves: float = 1.0,
) -> float | None:
    """How many times as fast as flatten a placement is with other iterations than the planner
    believes; None: it has no room.

    Args:
      halves: times that all on halves of the devices takes in a tail of what is believed.
    """
    seconds = []
    for asked in (placing.flat, one):
        if asked and asked.tail:
            iterations = placing.with_tail(asked.tail, halves) or "no tail"
        else:
            iterations = placing.best_iterations(asked) if asked else "not among the candidates"
        if isinstance(iterations, str):
            return None
        seconds.append(fmean(scheduled(changed(x)).seconds for x in iterations))
    return seconds[0] / seconds[1]


def measured(setting: Setting, data: Path, wrong: tuple[float, ...]) -> dict[str, Any]:
    placing = Placing(question_of(setting.config(data), ""))
    found = placing.placements()
    streamed = next((x for x in placing.every if x.name(placing.roles) == STREAMED), None)
    shown = {x.name: x.seconds or x.refusal for x in found.shown()}
    return {
        "of_a_device": setting.of_a_device,
        "chosen": found.chosen.name,
        "reason": found.reason,
        "times_as_fast": 1 + found.gain(found.chosen),
        "with_passes": {
            str(times): speed_up(
                placing, found.chosen.candidate, partial(with_passes, times=times), times
            )
            for times in wrong
        },
        # As in a run whose KL is in the loss, or that has none.
        "streamed_without_old_logprobs": speed_up(
            placing, streamed, partial(without, name="log-probabilities of the policy")
        ),
        "bound": found.chosen.bound,
        "seconds": shown,
        "memory_gib": {str(x.devices): round(x.num_bytes / 2**30, 1) for x in found.chosen.memory},
        "considered": found.num_considered,
    }


def summary(cells: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    usable = [x for x in cells.values() if x["bound"]]  # at least one placement has room
    yield f"{len(cells) - len(usable)} settings without room"
    if not usable:
        return
    few = [x["times_as_fast"] for x in usable if x["of_a_device"] <= 64]
    yield f"{len(usable)} settings; least {min(x['times_as_fast'] for x in usable):.3f} x of flatten"
    if few:
        yield f"at most 64 responses a device: {fmean(few):.3f} x in the mean of {len(few)}"
    if others := [x for cell in usable for x in cell["with_passes"].values() if x]:
        yield f"with wrong passes: least {min(others):.3f} x"


def main() -> None:
    parser = options(__doc__, has_data=True)
    parser.add_argument("--models", default="qwen3-8b,qwen3-14b")
    parser.add_argument("--devices", default="4,8,16,32")
    parser.add_argument("--responses", default="512,2048")
    parser.add_argument("--lengths", default="reasoning,math")
    parser.add_argument(
        "--wrong", default="0.8,1.2", help="times that passes take of what is believed"
    )
    args = parser.parse_args()
    wrong = tuple(map(float, args.wrong.split(",")))
    cells: dict[str, Any] = {}
    if args.out and args.out.exists():
        cells = json.loads(args.out.read_text())["settings"]
    sizes = (map(int, args.devices.split(",")), map(int, args.responses.split(",")))
    for chosen in product(args.models.split(","), *sizes, args.lengths.split(",")):
        setting = Setting(*chosen)
        if str(setting) in cells:
            continue
        cells[str(setting)] = cell = measured(setting, args.data, wrong)
        print(f"{setting}: {cell['times_as_fast']:.3f} x, {cell['reason']}", flush=True)
        write(args.out, {"summary": [*summary(cells)], "settings": cells})
    print(*summary(cells), sep="\n")


if __name__ == "__main__":
    main()
