"""The `plan` command: predicts the rollouts and updates of a machine that need not be at hand."""

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from pat_jax.common.bars import bar as progress_bar
from pat_jax.common.bars import note
from pat_jax.common.devices import configure
from pat_jax.common.files import replace_text
from pat_jax.common.html.figure import Figure
from pat_jax.config.command_line import dump
from pat_jax.config.critic import REWARD_MODEL, critic_source
from pat_jax.config.programs import program_choice
from pat_jax.config.role_table import CRITIC, TEACHER
from pat_jax.engine.record.plot import draw_rollout, plot_rollout
from pat_jax.engine.sizing.draft_choice import checkpoint_shape, drafter_of, shape_of
from pat_jax.engine.sizing.layout_choice import check_lengths
from pat_jax.models.config import Head, ModelConfig
from pat_jax.models.presets import preset
from pat_jax.profiling.capacity.costs import costs_of
from pat_jax.profiling.capacity.page import page, plan_text
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import planned
from pat_jax.profiling.capacity.question import Question
from pat_jax.profiling.capacity.report import PlanReport
from pat_jax.profiling.capacity.resting import settled
from pat_jax.profiling.cross_compile.by_arithmetic import (
    by_arithmetic,
    check_room,
    has_equal_layers,
)
from pat_jax.profiling.cross_compile.compile import DEPTHS, Compilation, compile_for, installed
from pat_jax.profiling.cross_compile.target_build import Order
from pat_jax.profiling.predict.expert_width import settled_width
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.comparison import Series
from pat_jax.profiling.simulate.length_files import find_lengths
from pat_jax.run.files.folder import CONFIG_FILE, check_run_dir, log_to, make_run_dir

REPORT_FILE = "plan.json"
PAGE_FILE = "plan.html"
PICTURE_FILE = "rollout.svg"


@dataclass(frozen=True)
class Planned:
    """A plan, and the folder with its page, figures and picture."""

    report: PlanReport
    folder: Path

    @property
    def page(self) -> Path:
        return self.folder / PAGE_FILE

    @property
    def figures(self) -> Path:
        return self.folder / REPORT_FILE

    def plot(self) -> Figure:
        """Draws the first replayed rollout: running sequences over time, and the layout."""
        return draw_rollout(self.report.comparison.traces[0])

    def __repr__(self) -> str:
        return plan_text(self.report)


def made_plan(config: PlanConfig, command: str) -> Planned:
    if not config.run_dir:
        machine = f"{Path(config.model).name}-{config.target.replace(':', '-')}"
        run_dir = f"runs/plan-{machine}-{datetime.now():%Y%m%d-%H%M%S}"
        config = replace(config, run_dir=run_dir)
    configure(0)
    question = question_of(config, command)
    config = question.options
    folder = check_run_dir(config.run_dir, is_resumed=False)
    if config.compile:
        installed(question.build.order.target)
    lock = make_run_dir(config.run_dir, is_resumed=False)
    try:
        replace_text(folder / CONFIG_FILE, dump(config))
        log_to(folder / "run.log")
        report = planned(question, compiled(question) if config.compile else None)
        keep(report, folder)
    finally:
        lock.release()
    return Planned(report, folder)


def question_of(config: PlanConfig, command: str) -> Question:
    """Returns the question for a plan, from the options. Writes and compiles nothing. Raises
    UserError if anything in the options is wrong."""
    target = Target.parse(config.target)
    model = model_of(config.model)
    config, shorter = config.settled(model.max_position)
    if shorter:
        note(shorter)
    rollout = config.rollout
    check_lengths(rollout, model, config.model)
    width = settled_width(target, model, rollout, config.experts, rollout.num_responses)
    config = replace(config, rollout=replace(rollout, expert_width=width))
    lengths = find_lengths(config.lengths)
    platform = target.chip.platform
    drafter = drafter_of(
        config.speculation, model, platform, rollout.max_length, shape_of, folder=config.model
    )
    draft_model = drafter.policy and drafter.policy.config
    depths = DEPTHS[config.layers if has_equal_layers(model) else "all"]
    others = others_of(config, model)
    run = program_choice(config, [*others], num_layers=model.num_layers, platform=platform)
    order = settled(Order.of(target, run, model, depths, draft_model, others))
    build = by_arithmetic(order)
    check_room(build, config.model)
    profile = Path(config.profile) if config.profile else None
    costs = costs_of(build, profile, config.sums)
    samples = rollout.num_generations
    draw = config.draw(rollout.num_responses, rollout.max_completion_length, samples)
    return Question(
        command,
        config.model,
        build,
        Series(draw, config.rollouts),
        lengths,
        costs,
        config,
        config.draft_source(costs.drafts, samples),
    )


def model_of(name: str, option: str = "model", head: Head = "vocab") -> ModelConfig:
    """Returns the shape of a model. Raises UserError if `name` is neither a usable checkpoint nor a
    built-in shape."""
    return checkpoint_shape(name, option, head) or preset(name)


def others_of(config: PlanConfig, policy: ModelConfig) -> dict[str, ModelConfig]:
    """Returns the shapes of all roles except the policy and its reference, by name; none if nothing
    is trained. Raises UserError as `model_of` does."""
    others: dict[str, ModelConfig] = {}
    if not config.train:
        return others
    names = [x.removeprefix(REWARD_MODEL) for x in config.reward if x.startswith(REWARD_MODEL)]
    scoring = [model_of(name, "reward", "scalar") for name in names]
    if config.algorithm.has_critic:
        name = critic_source(config.critic.model, config.reward, config.model)
        others[CRITIC] = model_of(name, "critic.model", "scalar") if name else policy
    for number, model in enumerate(scoring, 1):
        others[f"reward model {number}" if len(scoring) > 1 else "reward model"] = model
    others = {name: replace(model, head="scalar") for name, model in others.items()}
    if name := config.teacher.model:
        others[TEACHER] = model_of(name, "teacher.model")
    return others


def compiled(question: Question) -> Compilation:
    with progress_bar(total=0, unit="program", desc="compiling", disable=False) as bar:

        def show(done: int, total: int, last: str) -> None:
            bar.total = total
            bar.set_postfix_str(last)
            bar.update(done - bar.n)

        return compile_for(question.build.order, progress=show)


def keep(report: PlanReport, folder: Path) -> None:
    """Writes the plan's figures, picture and page into `folder`."""
    replace_text(folder / REPORT_FILE, report.to_json())
    plot_rollout(report.comparison.traces[0], folder / PICTURE_FILE)
    replace_text(folder / PAGE_FILE, page(report))
