"""The loop of a run that learns from files: packs examples into a batch and updates, step by step.

Connects the packages. Knows no option of the command line and no array.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pat_jax.common.devices import configure
from pat_jax.config.fine_tuning import FineTuning
from pat_jax.rl.data.examples import Example, Pair
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.checkpoints.json_state import declared
from pat_jax.run.checkpoints.skipped_steps import NonFiniteSteps
from pat_jax.run.logging.banner import introduction
from pat_jax.run.logging.speed import describe_memory, describe_update
from pat_jax.run.process.distributed import meet
from pat_jax.run.process.open_run import Kept, OpenRun
from pat_jax.run.process.steps import Steps
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.results.export import export_policy
from pat_jax.run.sft.inputs import padding_of, tokenizer_dir
from pat_jax.run.sft.setup import SftSetup, build
from pat_jax.run.start.adapters import check_base, freeze_base, initial_params
from pat_jax.run.start.compiling import compile_update
from pat_jax.run.start.reference import begin_reference, resume_reference
from pat_jax.training.build import schedule_of


@dataclass(frozen=True)
class Drawn:
    """Counts what was drawn since the run began, across resumptions; saved in each checkpoint."""

    examples: int = 0  # where the next batch begins
    tokens: int = 0

    def __post_init__(self):
        if min(self.examples, self.tokens) < 0:
            raise ValueError("a count is below zero")

    def plus(self, examples: Sequence[Example | Pair]) -> "Drawn":
        return Drawn(self.examples + len(examples), self.tokens + sum(map(len, examples)))

    def metrics(self, epoch: int) -> dict[str, float]:
        """Returns `progress/*`. `epoch` is the number of examples in one epoch."""
        return {"progress/tokens": self.tokens, "progress/epoch": self.examples / epoch}

    def to_json(self) -> dict[str, Any]:
        return {"drawn": asdict(self)}

    @classmethod
    def from_json(cls, meta: Mapping[str, Any]) -> "Drawn":
        return cls(**meta["drawn"])


def run(config: FineTuning, signals: StopSignals, command: str) -> None:
    """Runs `python -m pat_jax.COMMAND` with these options."""
    config = meet(config, signals)
    SftRun(build(config, configure(config.devices)), signals, command).run()


class SftRun:
    """One run that learns from files, from compilation to the export."""

    def __init__(self, setup: SftSetup, signals: StopSignals, command: str = "sft"):
        self.setup, self.trainer, self.lessons = setup, setup.trainer, setup.lessons
        self.config = config = setup.config
        self.learning_rate = schedule_of(config.optimizer_in_use, setup.steps)
        self.open = OpenRun(config, command, steps=setup.steps, fingerprint=setup.fingerprint)
        self.steps = Steps(self.open, signals, self.kept)
        most, notify = config.optimizer.max_skipped, self.open.progress.print
        self.skipped = NonFiniteSteps(self.open.folder, most, notify)

    def run(self) -> None:
        with self.steps.kept_at_a_stop():
            self.open.page.write()
            self.compile()
            self.begin()
            self.learn()
            self.finish()

    def compile(self) -> None:
        setup, notify = self.setup, self.open.progress.print
        for line in setup.note.splitlines():
            notify(line)
        learning, lora = self.lessons.TITLE, self.trainer.trained.lora
        notify(introduction(self.config, setup.policy, setup.devices, learning, lora=lora))
        notify(f"run folder {self.config.run_dir}; layout {self.trainer.layout.split}")
        start = time.perf_counter()
        compile_update(setup.roles, setup.memory, self.config.memory_options, self.open.progress)
        self.compile_s = time.perf_counter() - start
        notify(f"compiled in {self.compile_s:.1f} s")

    def begin(self) -> None:
        """Restores parameters, optimizer and cursor from the checkpoint, or initializes them."""
        self.open.tell_changes()
        self.base_checksum = freeze_base(self.trainer, self.config)
        found = self.open.restore({"train": self.trainer.abstract_state})
        if found is None:
            self.steps.first, self.drawn = 0, Drawn()
            self.state = self.trainer["init_state"](initial_params(self.trainer, self.config))
            begin_reference(self.setup.roles, self.config.run_dir, self.state)
        else:
            self.steps.first, saved, meta = found
            resume_reference(self.setup.roles, self.config.run_dir, self.steps.first)
            check_base(meta, self.base_checksum, self.config)
            self.state = saved["train"]
            with self.open.checkpoints.as_written(self.steps.first):
                self.drawn, examples = declared(Drawn.from_json(meta)), meta["examples"]
            if examples != self.setup.examples.checksum:
                told = "resumed with other examples than before, or in another order"
                self.open.progress.print(told)

    def learn(self) -> None:
        self.steps.has_learned(self.steps.first, {})
        with self.steps.going_on():
            for step in range(self.steps.first, self.setup.steps):
                self.iterate(step)
            self.evaluate(self.setup.steps)

    def iterate(self, step: int) -> None:
        config, clock = self.config, self.steps.clock
        if config.eval.every and step % config.eval.every == 0:
            self.evaluate(step)
        clock.reset()
        with clock("pack"):
            examples = self.setup.examples.draw(self.drawn.examples, config.batch_size)
            batch = self.lessons.batch(examples, self.setup.shapes)
        with self.steps.signals.held():  # from here on the step is completed before a stop
            with clock("update"):
                batch = self.setup.roles.read(batch)
                self.state, result = self.trainer.update(self.state, batch)
            measured: dict[str, Any] = dict(result.metrics)
            self.drawn = self.drawn.plus(examples)
            self.steps.has_learned(step + 1, measured)
            rate = self.learning_rate(max(0, result.updates_applied - 1))
            measured["train/learning_rate"] = float(rate)
            measured["train/padding_efficiency"] = batch.padding_efficiency
            measured |= self.describe(examples) | self.drawn.metrics(len(self.setup.examples))
            self.skipped.note(step + 1, batch.mini_batches, result.applied)
            measured |= describe_memory(self.setup.devices)
            self.steps.write(step + 1, measured)
            self.steps.end(step + 1, measured)

    def describe(self, examples: Sequence[Any]) -> dict[str, float]:
        lora = self.trainer.trained.lora
        speed = describe_update(
            self.setup.policy.config,
            self.setup.devices,
            self.lessons.lengths(examples),
            passes=1,
            seconds=self.steps.clock.seconds["update"],
            adapter_weights=lora.active_weights if lora else None,
        )
        return speed | {"train/tokens_in_loss": self.lessons.num_in_loss(examples)}

    def evaluate(self, step: int) -> None:
        """Measures and prints the loss on held-out examples, and what else tells how good it is."""
        if self.setup.heldout is None:
            return
        start = time.perf_counter()
        batch = self.trainer.predict(self.state, self.setup.roles.read(self.setup.heldout))
        measured: dict[str, Any] = dict(self.lessons.measure(batch, self.trainer.old))
        measured["eval/seconds"] = time.perf_counter() - start
        self.steps.metrics.write(step, measured)
        self.open.page.write()
        words = self.lessons.words(measured, len(self.lessons.heldout))
        self.open.progress.print(f"step {step}: {words}")

    def kept(self) -> Kept:
        meta = {"examples": self.setup.examples.checksum, "base_checksum": self.base_checksum}
        return {"train": self.state}, self.drawn.to_json() | meta

    def finish(self) -> None:
        config, steps, first = self.config, self.setup.steps, self.steps.first
        if steps > first:
            self.steps.save_last(steps)
        self.open.close()
        if config.checkpoint.export_dir:
            tokenizer = tokenizer_dir(config.model, self.setup.policy.config)
            is_scored, done = self.lessons.HEAD == "scalar", max(steps, first)
            padding = padding_of(HuggingFaceTokenizer(tokenizer)) if is_scored else None
            made = self.trainer.trained, self.state.params
            export_policy(config, *made, done, tokenizer, padding)
        self.open.tell_end(self.compile_s)
