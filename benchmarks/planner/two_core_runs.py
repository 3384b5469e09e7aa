"""Runs of PPO on two cores that wait for their turns: one process with both, or two with one each.

A program of one CPU device uses every core that its process may use, so overlap within one process cannot
be seen. Of a run with `separate` rollouts, one process has the rollouts and a core; the other one has all
else and the other core. Responses go over a pipe as they end, and weights come back over it. Both are the
product's `Run`; only its generator is replaced. The length of every response is forced.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.planner.two_core_case import Case, Elsewhere, Forced
from benchmarks.planner.two_core_tables import passes, replayed_rollout
from pat_jax.common.devices import configure
from pat_jax.config.command_line import parse
from pat_jax.config.run import RunConfig
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.rl.batches.types import Prompt, Rollout
from pat_jax.run.collect import Drawn, Experience
from pat_jax.run.early_stages import EarlyStages
from pat_jax.run.lanes import Lanes
from pat_jax.run.loop import Run
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.scoring import open_scorer
from pat_jax.run.setup import Setup, build
from pat_jax.run.start.compiling import compile_update
from pat_jax.training.transfer import logprob_gap


class Turn(NamedTuple):
    """What an iteration took."""

    seconds: float
    clock: Mapping[str, float]  # seconds of its stages
    measured: Mapping[str, Any]  # its metrics
    lengths: np.ndarray  # int[responses], tokens of each response
    ended_s: Sequence[float]  # of each response, since the rollout began


class InTurns(Run):
    """A run with all devices, whose iterations begin when they are asked for."""

    def __init__(self, setup: Setup, scorer: Any, signals: StopSignals, case: Case, **links: Any):
        super().__init__(setup, scorer, signals)
        self.case, self.turns = case, links["turns"]
        self.link: Connection | None = links.get("link")
        self.overlap = "none"
        self.generator: Forced | Elsewhere

    def iterate(self, step: int) -> None:
        jax.block_until_ready(self.learner.states)
        while (asked := self.turns.recv()) == "tables":
            self.turns.send(self.tables())
        self.overlap = asked
        start = time.perf_counter()
        super().iterate(step)
        jax.block_until_ready(self.learner.states)
        taken, clock = time.perf_counter() - start, dict(self.steps.clock.seconds)
        lengths = np.array([len(one.tokens) for one in self.responses])
        self.turns.send(Turn(taken, clock, self.measured, lengths, self.generator.ended_s))

    @property
    def responses(self) -> list[Rollout]:
        return [one for group in self.experience.groups for one in group.rollouts]

    def update(self, step: int, experience: Experience, measured: dict[str, Any]) -> None:
        self.experience = experience
        super().update(step, experience, measured)

    def end_step(self, step: int, last: Drawn, measured: dict[str, Any]) -> None:
        super().end_step(step, last, measured)
        self.measured = {name: x for name, x in measured.items() if isinstance(x, int | float)}

    def warm_up(self, lengths: LengthModel) -> None:
        super().warm_up(lengths)
        self.generator = Forced.like(self.generator, self.case)

    def tables(self) -> dict[str, Any]:
        """The seconds of a replayed rollout, and when its responses end."""
        return replayed_rollout(self.setup, self.generator.planner, self.case.workload())


class Rollouts(InTurns):
    """The rollouts of a run whose other stages are in another process."""

    def learn(self) -> None:
        engine, link = self.setup.engine, self.link
        assert link is not None
        layout = next(iter(engine.layouts.values()))
        shapes = layout.param_shardings(self.setup.policy)

        def scores(tokens: np.ndarray) -> jax.Array:
            link.send(tokens)
            return jnp.asarray(link.recv()[1])

        while True:
            what, content = link.recv()
            if what == "load":
                engine.release_weights()
                leaves = jax.tree.unflatten(jax.tree.structure(shapes), content)
                engine.set_weights(jax.device_put(leaves, shapes), layout)
                link.send(None)
            elif what == "compare":
                link.send(logprob_gap(engine, scores, content))
            elif what == "tables":
                link.send(self.tables())
            else:
                prompts, number = content
                _, report = self.generator.rollout(
                    prompts, number, lambda i, one: link.send((i, one))
                )
                link.send(report)


class Apart(InTurns):
    """A run whose rollouts are generated in another process.

    The first of its two devices stands for that process; no program but the copy of weights runs there.
    """

    def compile(self) -> None:
        config, setup = self.config, self.setup
        compile_update(setup.roles, setup.memory.limit, config, self.open.progress)
        for one in setup.reward_models.values():
            one.reader.compile(by_need=False)

    def warm_up(self, lengths: LengthModel) -> None:
        setup = self.setup
        made_of = setup.engine, setup.trainer, FixedLayout(next(iter(setup.layouts)))
        rest = self.config.rollout, self.config.seed, lengths
        self.generator = self.elsewhere = Elsewhere(*made_of, *rest, link=self.link)
        self.generator.load(self.learner.state.params)
        self.generator.compare(self.learner.state.params)

    def early_stages(self, lanes: Lanes, prompts: Sequence[Prompt], step: int) -> EarlyStages:
        """What the overlap of this iteration leaves of the lanes, which are those of `gradients`."""
        reads = lanes.readers if self.overlap != "none" else []
        for one in self.setup.reward_models.values():
            one.scores.score_on(reads[0].thread if reads else None)
        trained = lanes.trained if self.overlap == "gradients" else []
        return super().early_stages(Lanes(reads, trained), prompts, step)

    def tables(self) -> dict[str, Any]:
        """The seconds of a rollout in the other process, replayed, and of each pass in this one."""
        rollout = self.elsewhere.ask("tables", None)
        return {**rollout, "passes": passes(self.setup, self.learner, self.experience)}


def main_of_process(
    kind: type[InTurns], options: Sequence[str], case: Case, links: Mapping[str, Any]
) -> None:
    """The main function of a process."""
    sys.stdout = sys.stderr
    config = parse(list(options), RunConfig, prog="pat_jax.train")
    with StopSignals() as signals:
        setup = build(config, configure(config.devices))
        with open_scorer(config, setup.task.rewards, setup.reward_models) as scorer:
            kind(setup, scorer, signals, case, **links).run()
