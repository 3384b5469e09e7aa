"""`python -m pat_jax.plan`: what adaptive TP would give on machines that are not there.

    python -m pat_jax.plan --model llama-3.1-8b --target h100:8 --responses 1024 --max_completion_length 24576

Compiles the engine's own programs with the target's own compiler, counts what they hold and send,
predicts what steps take, and replays rollouts with the planner that ships. Leaves a table here, and a
report as JSON, pictures and one HTML page in the run folder.
"""

import shlex
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from pat_jax.common.devices import configure
from pat_jax.common.files import replace_text
from pat_jax.common.rules import check_context
from pat_jax.config.command_line import dump, parse, run_command
from pat_jax.models.config import ModelConfig
from pat_jax.models.hf_load import check_checkpoint
from pat_jax.models.presets import preset
from pat_jax.profiling.capacity.costs import costs_of
from pat_jax.profiling.capacity.page import write_page
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import Question, planned
from pat_jax.profiling.capacity.report import PlanReport
from pat_jax.profiling.capacity.text import plan_text
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic, check_room
from pat_jax.profiling.cross_compile.compile import DEPTHS, Compilation, compile_for, installed
from pat_jax.profiling.cross_compile.plant import Order
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.comparison import Series
from pat_jax.profiling.simulate.length_files import find_lengths
from pat_jax.profiling.simulate.response_lengths import Draw
from pat_jax.run.folder import CONFIG_FILE, check_run_dir, log_to, make_run_dir
from pat_jax.run.plot import plot_rollout

REPORT_FILE, PAGE_FILE, PICTURE_FILE = "plan.json", "plan.html", "rollout.png"


def main() -> None:
    config = parse(sys.argv[1:], PlanConfig, prog="python -m pat_jax.plan", presets=None)
    if not config.run_dir:
        config = replace(config, run_dir=f"runs/{folder_name(config, datetime.now())}")
    configure(0)
    question = question_of(config, f"python -m pat_jax.plan {shlex.join(sys.argv[1:])}")
    target = question.plant.order.target
    run = config.run(target)
    folder = check_run_dir(run)
    if config.compile:
        installed(target)
    make_run_dir(run, folder)
    replace_text(folder / CONFIG_FILE, dump(config))
    log_to(folder / "run.log")
    report = planned(question, compiled(config, question) if config.compile else None)
    keep(report, folder)
    print(plan_text(report))
    print(f"\nreport {folder / PAGE_FILE}, figures {folder / REPORT_FILE}")


def question_of(config: PlanConfig, command: str) -> Question:
    """
    Raises:
      UserError: whatever is wrong with what was asked; nothing has been written or compiled.
    """
    target, model = Target.parse(config.target), model_of(config.model)
    lengths_asked = {
        "max_prompt_length": config.max_prompt_length,
        "max_completion_length": config.max_completion_length,
    }
    check_context(lengths_asked, model.max_position, config.model)
    lengths = find_lengths(config.lengths)
    order = Order.of(target, config.run(target), model, DEPTHS)
    check_room(order, config.model)
    plant = by_arithmetic(order)
    profile = Path(config.profile) if config.profile else None
    return Question(
        command,
        config.model,
        plant,
        Series(draw(config), config.rollouts),
        lengths,
        costs_of(plant, profile, Path(config.data), config.sums),
    )


def draw(config: PlanConfig) -> Draw:
    return Draw(
        config.responses,
        config.max_completion_length,
        config.num_generations,
        config.correlation,
        config.length_scale,
        config.prompt_tokens,
        config.seed,
    )


def model_of(name: str) -> ModelConfig:
    """
    Raises:
      UserError: it is no usable checkpoint directory and no built-in shape.
    """
    return check_checkpoint(name) if Path(name).is_dir() else preset(name)


def folder_name(config: PlanConfig, now: datetime) -> str:
    model, target = Path(config.model).name, config.target.replace(":", "-")
    return f"plan-{model}-{target}-{now:%Y%m%d-%H%M%S}"


def compiled(config: PlanConfig, question: Question) -> Compilation:
    order = question.plant.order
    with tqdm(total=0, unit="program", desc="compiling", dynamic_ncols=True) as bar:

        def show(done: int, total: int, last: str) -> None:
            bar.total = total
            bar.set_postfix_str(last)
            bar.update(done - bar.n)

        return compile_for(
            order.target, question.run, order.model, layers=config.layers, progress=show
        )


def keep(report: PlanReport, folder: Path) -> None:
    """Everything that a plan leaves behind."""
    replace_text(folder / REPORT_FILE, report.to_json())
    plot_rollout(report.comparison.traces[0], folder / PICTURE_FILE)
    write_page(report, folder / PAGE_FILE)


if __name__ == "__main__":
    run_command(main)
