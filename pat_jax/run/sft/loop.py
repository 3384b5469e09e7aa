"""The loop of supervised fine-tuning: examples, packed, to an update, and again.

Wires the rooms together. Knows no option of the command line and no array.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pat_jax.common.stopwatch import Stopwatch
from pat_jax.rl.algorithm.supervised import num_learned, to_example_batch
from pat_jax.rl.data.examples import Example
from pat_jax.run.checkpoints.skipped_steps import Skipped
from pat_jax.run.logging.banner import introduction
from pat_jax.run.logging.speed import describe_memory, describe_update
from pat_jax.run.process.open_run import Kept, OpenRun
from pat_jax.run.process.stop_signals import Stopped, StopSignals
from pat_jax.run.results.export import export_policy
from pat_jax.run.sft.setup import SftSetup
from pat_jax.run.start.adapters import check_base, freeze_base, initial_params
from pat_jax.run.start.compiling import compile_update
from pat_jax.training.build import schedule_of
from pat_jax.training.supervised import cross_entropy


@dataclass(frozen=True)
class Drawn:
    """Since the run began, its resumptions included: the cursor of each checkpoint."""

    examples: int = 0  # where the next batch begins
    tokens: int = 0

    def plus(self, examples: Sequence[Example]) -> "Drawn":
        return Drawn(self.examples + len(examples), self.tokens + sum(map(len, examples)))

    def metrics(self, epoch: int) -> dict[str, float]:
        """
        Args:
          epoch: examples of one.
        """
        return {"progress/tokens": self.tokens, "progress/epoch": self.examples / epoch}

    def to_json(self) -> dict[str, Any]:
        return {"drawn": asdict(self)}

    @classmethod
    def from_json(cls, meta: Mapping[str, Any]) -> "Drawn":
        return cls(**meta["drawn"])


class SftRun:
    """One run, from the first compilation to the export."""

    def __init__(self, setup: SftSetup, signals: StopSignals):
        self.setup, self.signals = setup, signals
        self.config = config = setup.config
        self.trainer, self.steps = setup.trainer, setup.steps
        self.learning_rate = schedule_of(config.optimizer_in_use, setup.steps)
        self.open = OpenRun(config, "sft", steps=setup.steps, fingerprint=setup.fingerprint)
        self.progress, self.stopwatch = self.open.progress, Stopwatch()
        most = config.optimizer.max_skipped
        self.skipped = Skipped(self.open.folder, most, self.progress.print)
        self.steps_done: int | None = None  # None: there is nothing yet that is worth keeping
        signals.last_words = self.open.last_words

    def run(self) -> None:
        try:
            self.open.page.write()
            self.compile()
            self.begin()
            self.learn()
            self.finish()
        except Stopped as stop:
            self.open.stop(stop, self.steps_done, self.kept)
            raise

    def compile(self) -> None:
        setup, say = self.setup, self.progress.print
        for line in setup.note.splitlines():
            say(line)
        learning, lora = "supervised fine-tuning", self.trainer.trained.lora
        say(introduction(self.config, setup.policy, setup.devices, learning, lora=lora))
        say(f"run folder {self.config.run_dir}; layout {self.trainer.layout.split}")
        start = time.perf_counter()
        compile_update(self.trainer, setup.memory, self.config, self.progress)
        self.compile_s = time.perf_counter() - start
        say(f"compiled in {self.compile_s:.1f} s")

    def begin(self) -> None:
        """Parameters, optimizer and what has been drawn: from the checkpoint, or from the start."""
        self.open.tell_changes()
        self.base_checksum = freeze_base(self.trainer, self.config)
        found = self.open.restore({"train": self.trainer.abstract_state})
        if found is None:
            self.first_step, self.drawn = 0, Drawn()
            self.state = self.trainer["init_state"](initial_params(self.trainer, self.config))
        else:
            self.first_step, saved, meta = found
            check_base(meta, self.base_checksum, self.config)
            self.state, self.drawn = saved["train"], Drawn.from_json(meta)
            if meta["examples"] != self.setup.examples.checksum:
                self.progress.print("resumed with other examples than before, or in another order")

    def learn(self) -> None:
        self.progress.start(self.first_step)
        self.steps_done, self.unwritten = self.first_step, dict[str, Any]()
        with (
            self.open.page.kept(self.first_step),
            self.open.metrics(self.first_step) as self.metrics,
            self.open.saved_at_an_error(self.signals, self.last),
        ):
            for step in range(self.first_step, self.steps):
                self.iterate(step)
            self.evaluate(self.steps)

    def iterate(self, step: int) -> None:
        config, clock = self.config, self.stopwatch
        if config.eval.every and step % config.eval.every == 0:
            self.evaluate(step)
        clock.reset()
        with clock("pack"):
            examples = self.setup.examples.draw(self.drawn.examples, config.batch_size)
            batch = to_example_batch(examples, self.setup.shapes)
        with self.signals.held():  # from here to its end a step is carried through
            with clock("update"):
                self.state, result = self.trainer.update(self.state, batch, None)
            measured: dict[str, Any] = dict(result.metrics)
            # From here on this is the step that is saved, whatever fails.
            self.steps_done, self.drawn = step + 1, self.drawn.plus(examples)
            self.unwritten = measured
            rate = self.learning_rate(max(0, result.updates_applied - 1))
            measured["train/learning_rate"] = float(rate)
            measured["train/padding_efficiency"] = batch.padding_efficiency
            measured |= self.describe(examples) | self.drawn.metrics(len(self.setup.examples))
            self.skipped.note(step + 1, batch.mini_batches, result.applied)
            self.end_step(step + 1, measured)

    def end_step(self, step: int, measured: dict[str, Any]) -> None:
        measured |= describe_memory(self.setup.devices) | self.stopwatch.metrics
        measured["timing/step"] = self.stopwatch.elapsed
        self.metrics.write(step, measured)
        self.unwritten = {}
        self.progress.step(step, measured)
        if self.open.saves.is_due(step):
            self.open.save(step, self.kept(), self.metrics)

    def describe(self, examples: list[Example]) -> dict[str, float]:
        lora = self.trainer.trained.lora
        speed = describe_update(
            self.setup.policy.config,
            self.setup.devices,
            np.array([len(example) for example in examples]),
            passes=1,
            seconds=self.stopwatch.seconds["update"],
            adapter_weights=lora.num_weights if lora else None,
        )
        return speed | {"train/tokens_in_loss": num_learned(examples)}

    def evaluate(self, step: int) -> None:
        """The loss on held-out examples."""
        if self.setup.heldout is None:
            return
        start = time.perf_counter()
        loss = cross_entropy(self.trainer, self.state.params, self.setup.heldout)
        seconds = time.perf_counter() - start
        self.metrics.write(step, {"eval/loss": loss, "eval/seconds": seconds})
        self.open.page.write()
        many = self.setup.num_heldout
        self.progress.print(f"step {step}: held-out loss {loss:.4f} ({many} examples)")

    def last(self) -> tuple[int, Kept]:
        """The last whole step, and what was measured in it."""
        assert self.steps_done is not None  # it is asked for while steps are made
        if self.unwritten:
            self.metrics.write(self.steps_done, self.unwritten)
        return self.steps_done, self.kept()

    def kept(self) -> Kept:
        meta = {"examples": self.setup.examples.checksum, "base_checksum": self.base_checksum}
        return {"train": self.state}, self.drawn.to_json() | meta

    def finish(self) -> None:
        config = self.config
        if self.steps > self.first_step:
            with self.signals.held():
                self.open.save_last(self.steps, self.kept())
        self.open.close()
        if config.checkpoint.export_dir:
            step = max(self.steps, self.first_step)
            trained, form = self.trainer.trained, config.lora.export
            export_policy(config, trained, self.state.params, step, form)
        self.open.tell_end(self.compile_s)
