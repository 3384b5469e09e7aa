"""Opens a run: compiles its programs, restores or begins its states, and warms up.

Each part returns what later parts need; the run is complete once all have.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from pat_jax.common.hosts.together import process_group
from pat_jax.rl.rewards.responses import response_reader
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.checkpoints.journal import RolloutJournal
from pat_jax.run.collect import Collector
from pat_jax.run.early_columns import EarlyColumns
from pat_jax.run.evaluation import Evaluator
from pat_jax.run.generation import Generator
from pat_jax.run.lanes import Lanes, open_lanes
from pat_jax.run.learning import Learner
from pat_jax.run.logging.completions import Completions
from pat_jax.run.loop import Run
from pat_jax.run.own_reads import OwnReads
from pat_jax.run.process.open_run import OpenRun
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.roles.reward_models import load_reward_models
from pat_jax.run.scoring import try_out
from pat_jax.run.start.compiling import announce, compile_run
from pat_jax.run.start.earlier_texts import EarlierIterations, earlier_iterations, recall
from pat_jax.run.start.init_state import Beginning, begin
from pat_jax.run.start.prepare import cost_planner, frozen, warm_up
from pat_jax.run.start.setup import Setup
from pat_jax.training.roles import States


@contextmanager
def files_of(setup: Setup, signals: StopSignals) -> Iterator[OpenRun]:
    """Opens the run's folder, and holds it until the end."""
    config = setup.config
    files = OpenRun(config, "train", steps=config.steps, fingerprint=setup.fingerprint)
    signals.last_words = files.last_words
    try:
        yield files
    finally:
        files.release()


@contextmanager
def opened(
    setup: Setup, scorer: RewardScorer, signals: StopSignals, files: OpenRun
) -> Iterator[Run]:
    """Yields the run, ready for its first iteration. While entered, its reading threads live, and
    the last whole step is saved if a signal stops the run."""
    config, task, progress = setup.config, setup.task, files.progress
    with files.kept_at_a_stop(), ExitStack() as threads:
        (first,) = task.train.first(1)
        try_out(scorer, first, task.columns, config.rollout.num_generations, progress)
        files.page.write()
        announce(config, setup, progress)
        compiled = compile_run(config, setup, progress)
        files.tell_changes()
        began = begin(setup, files)
        load_reward_models(setup.reward_models)
        learner = Learner(config, setup, began, files)
        lanes = threads.enter_context(
            open_lanes(
                setup,
                lambda: learner.states,
                config.placement,
                is_deterministic=config.deterministic,
            )
        )
        earlier = None
        if room := setup.engine.text_room:
            earlier = earlier_iterations(config.run_dir, task, config.rollout, room)
            recall(earlier, began.steps_done, config.rollout.num_generations, progress.print)
        notify = progress.print
        completions = Completions(
            task.tokenizer, files.folder, notify, is_asked=config.log_completions
        )
        read = response_reader(task.columns, task.tokenizer)
        yield Run(
            setup=setup,
            files=files,
            signals=signals,
            compiled=compiled,
            first=began.steps_done,
            collector=_collector(setup, scorer, files, completions, began, lanes, learner),
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
            updates=lanes.late,
        )


def _collector(
    setup: Setup,
    scorer: RewardScorer,
    files: OpenRun,
    completions: Completions,
    began: Beginning,
    lanes: Lanes,
    learner: Learner,
) -> Collector:
    config, reads = setup.config, None

    def states() -> States:
        return learner.states

    if lanes.readers:
        reads = partial(EarlyColumns, lanes.readers)
    if setup.places.is_split:
        reads = partial(OwnReads.of_run, setup.roles, states)
    checkpoints = Path(config.run_dir) / CHECKPOINTS
    # Of a deterministic run, the rest of a rollout would run in other rows, and round differently.
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
    """Runs the compiled programs of the rollout; their measured times become the profile."""
    config, notify = setup.config, files.progress.print
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
