"""Opens a run: compiles programs, restores or initializes states, warms up. Also ends a run.

Each part returns what later parts need; the run is complete once all have. `loop.py` has its
iterations.
"""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pat_jax.common.hosts.together import process_group
from pat_jax.config.run import RunConfig
from pat_jax.engine.record.plot import plot_rollout
from pat_jax.engine.sizing.memory_checks import describe_peak
from pat_jax.models.kernels.row_attention import knows_branches
from pat_jax.rl.data import arithmetic
from pat_jax.rl.rewards.responses import response_reader
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.checkpoints.journal import RolloutJournal
from pat_jax.run.collect import Collector, Drawn, History
from pat_jax.run.evaluation import Evaluator
from pat_jax.run.generation import Generator
from pat_jax.run.learning import Learner
from pat_jax.run.logging.completions import Completions
from pat_jax.run.process.open_run import OpenRun, WholeStep
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.reads import ReadsAsTheyEnd, ReadsByProcess, Threads, open_threads
from pat_jax.run.roles.export import export_roles
from pat_jax.run.roles.reward_models import load_reward_models
from pat_jax.run.scoring import try_out
from pat_jax.run.start.compiling import Compiled, announce, compile_run
from pat_jax.run.start.earlier_texts import EarlierIterations, earlier_iterations
from pat_jax.run.start.init_state import Beginning, begin
from pat_jax.run.start.prepare import cost_planner, frozen, warm_up
from pat_jax.run.start.setup import Setup

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A training run that is compiled, restored and warmed up (`opened.py`).

    Attributes:
      first: number of iterations that were complete when the process started.
      earlier: responses of earlier iterations to copy drafts from, if any are kept.
      updates: the thread that updates during rollouts (`--placement.lag 1`), or None.
    """

    setup: Setup
    files: OpenRun
    signals: StopSignals
    compiled: Compiled
    first: int
    collector: Collector
    generator: Generator
    learner: Learner
    evaluator: Evaluator
    completions: Completions
    earlier: EarlierIterations | None
    updates: Executor | None

    @property
    def config(self) -> RunConfig:
        return self.setup.config

    def whole(self, step: int, history: History) -> WholeStep:
        """Returns what a checkpoint of `step` saves: the learner's present states and metadata."""
        totals, lengths = history
        # Counts of whole steps only: the batches of an interrupted step are drawn again.
        meta = {"lengths": lengths.to_json(), "problems": self.setup.task.checksums}
        meta |= self.learner.meta | totals.to_json()
        beside = [one.save for one in (self.earlier, self.learner.exit_head) if one is not None]
        return WholeStep(step, self.learner.states, meta, beside)


@contextmanager
def files_of(setup: Setup, signals: StopSignals) -> Iterator[OpenRun]:
    """Opens the run's folder, and keeps it locked until the end."""
    config = setup.config
    files = OpenRun(config, "train", steps=config.steps, fingerprint=setup.fingerprint)
    signals.last_words = files.last_words
    try:
        yield files
    finally:
        files.release()


def finish(run: Run, last: Drawn | None) -> None:
    """Saves and exports what was learned, and prints a summary."""
    config = run.config
    setup = run.setup
    plan = ""
    if last is not None:
        plan = last.report.first_plan
        with run.signals.held():
            run.files.save_last()
        run.collector.unfinished.finish()
        plot_rollout(last.report.trace, run.files.folder / "rollout.svg")
    run.files.close()
    log.info("%s", describe_peak(setup.memory, setup.devices, run.compiled.update))
    tokenizer_dir = arithmetic.TOKENIZER_DIR if config.data.is_arithmetic else None
    step = max(config.steps, run.first)
    export_roles(setup.roles, run.learner.states, step, config.run_dir, tokenizer_dir)
    run.files.tell_end(run.compiled.seconds, plan)


@contextmanager
def opened(
    setup: Setup, scorer: RewardScorer, signals: StopSignals, files: OpenRun
) -> Iterator[Run]:
    """Yields the run, ready for its first iteration. Inside this context the reading threads run,
    and the last whole step is saved if a signal stops the run."""
    config = setup.config
    task = setup.task
    progress = files.progress
    with files.kept_at_a_stop(), ExitStack() as ends:
        (first,) = task.train.first(1)
        try_out(scorer, first, task.columns, config.rollout.num_generations, progress)
        files.page.write()
        announce(setup, progress)
        compiled = compile_run(setup, progress)
        files.tell_changes()
        began = begin(setup, files)
        load_reward_models(setup.reward_models)
        learner = Learner(setup, began, files)
        threads = ends.enter_context(
            open_threads(
                setup,
                lambda: learner.states,
                config.placement,
                is_deterministic=config.deterministic,
            )
        )
        earlier = None
        if room := setup.engine.text_room:
            earlier = earlier_iterations(
                config.run_dir, task, config.rollout, room, began.steps_done, progress.print
            )
        completions = Completions(
            task.tokenizer, files.folder, progress.print, is_asked=config.log_completions
        )
        read = response_reader(task.columns, task.tokenizer)
        yield Run(
            setup=setup,
            files=files,
            signals=signals,
            compiled=compiled,
            first=began.steps_done,
            collector=_collector(setup, scorer, files, completions, began, threads, learner),
            generator=_generator(setup, files, learner, earlier, began),
            learner=learner,
            evaluator=Evaluator(
                config.eval,
                config.rollout,
                config.seed,
                task.heldout,
                read,
                scorer,
                completions,
                progress,
            ),
            completions=completions,
            earlier=earlier,
            updates=threads.updates,
        )


def _collector(
    setup: Setup,
    scorer: RewardScorer,
    files: OpenRun,
    completions: Completions,
    began: Beginning,
    threads: Threads,
    learner: Learner,
) -> Collector:
    config = setup.config
    roles = setup.roles
    reads = partial(ReadsAsTheyEnd, threads.readers)
    if setup.places.is_split:
        reads = partial(
            ReadsByProcess,
            list(roles.predictions(lambda: learner.states)),
            roles.micro_shapes,
            shares_prompts=knows_branches(setup.trainer.layout.platform),
        )
    checkpoints = Path(config.run_dir) / CHECKPOINTS
    # In a deterministic run, the rest of a rollout would run in other rows, with other rounding.
    unfinished = RolloutJournal(files.folder, checkpoints, is_on=not config.deterministic)
    return Collector(
        config.rollout,
        setup.task,
        scorer,
        completions,
        files.progress,
        unfinished,
        began.totals,
        reads,
        num_redraws=config.num_redraws,
        by_function=config.algorithm.is_by_function,
    )


def _generator(
    setup: Setup,
    files: OpenRun,
    learner: Learner,
    earlier: EarlierIterations | None,
    began: Beginning,
) -> Generator:
    """Warms up the rollout, whose measured times become the profile, and loads the policy."""
    config = setup.config
    notify = files.progress.print
    files.progress.stage("warming up")
    start = time.perf_counter()
    params = learner.state.params
    measured = warm_up(
        config.profile,
        setup.engine,
        setup.subject,
        setup.profile,
        partial(setup.trainer.transfer, params),
    )
    keep = partial(
        frozen,
        setup.subject,
        files.folder,
        measured,
        notify,
        is_deterministic=config.deterministic,
    )
    latency = process_group().agree("profile", keep)
    planner = setup.scripted or cost_planner(
        setup.engine,
        latency,
        began.lengths,
        setup.memory,
        is_frozen=config.deterministic,
    )
    generator = Generator(
        setup.engine,
        setup.trainer,
        planner,
        config.rollout,
        config.seed,
        began.lengths,
        learner.exit_head and learner.exit_head.trainer,
        earlier and earlier.responses,
    )
    generator.load(params)
    generator.compare(params)
    names = ", ".join(map(str, setup.layouts))
    notify(f"warmed up and profiled {names} in {time.perf_counter() - start:.1f} s")
    return generator
