"""The loop of a run that learns from files: packs examples into a batch and updates, step by step.

Connects the packages. Knows no option of the command line and no array.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pat_jax.common.json_text import of_json
from pat_jax.config.role_table import POLICY
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.data.examples import Example, Pair
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.checkpoints.skipped_steps import MOST_IN_A_ROW, NonFiniteSteps
from pat_jax.run.logging.banner import introduction
from pat_jax.run.logging.speed import describe_memory, describe_update, flops_of
from pat_jax.run.process.open_run import OpenRun, Steps, WholeStep, steps_after
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.roles.export import export_role
from pat_jax.run.roles.fingerprint import check_bases
from pat_jax.run.roles.role_params import (
    begin_reference,
    freeze_bases,
    initial_params,
    resume_reference,
)
from pat_jax.run.sft.inputs import padding_of, tokenizer_dir
from pat_jax.run.sft.setup import SftSetup
from pat_jax.run.start.compiling import compile_update


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
        return of_json(cls, meta["drawn"])


@dataclass(frozen=True)
class Position:
    """The state of a run after a step.

    Attributes:
      base_checksums: checksum of the adapters' base, by its name in a checkpoint's metadata.
    """

    step: int
    state: TrainState
    drawn: Drawn
    base_checksums: Mapping[str, int | None]

    def whole(self, examples: int) -> WholeStep:
        """Returns what a checkpoint saves; `examples` is the checksum of the training examples."""
        meta = {**self.drawn.to_json(), "examples": examples, **self.base_checksums}
        return WholeStep(self.step, {"train": self.state}, meta)


class SftRun:
    """One run that learns from files, from compilation to the export."""

    def __init__(self, setup: SftSetup, signals: StopSignals):
        self.setup = setup
        self.trainer = setup.trainer
        self.lessons = setup.lessons
        self.config = setup.config
        self.signals = signals
        self.learning_rate = setup.roles.learning_rates[self.trainer.name]
        command = "reward_model" if self.lessons.HEAD == "scalar" else "sft"
        self.files = OpenRun(self.config, command, steps=setup.steps, fingerprint=setup.fingerprint)
        signals.last_words = self.files.last_words
        self.skipped = NonFiniteSteps(MOST_IN_A_ROW, self.files.progress.print)

    def run(self) -> Position:
        """Runs to the end, and returns the final position."""
        with self.files.kept_at_a_stop():
            self.files.page.write()
            compile_s = self.compile()
            begun = self.begin()
            ended = self.learn(begun)
            self.finish(begun, ended, compile_s)
        return ended

    def compile(self) -> float:
        """Compiles the programs of the update. Returns the seconds that it took."""
        setup = self.setup
        notify = self.files.progress.print
        for line in setup.note.splitlines():
            notify(line)
        learning = self.lessons.TITLE
        lora = self.trainer.trained.lora
        model = self.config.model
        dtype = self.config.compute_dtype
        notify(introduction(model, setup.policy, setup.devices, dtype, learning, lora=lora))
        notify(f"run folder {self.config.run_dir}; layout {self.trainer.layout.split}")
        start = time.perf_counter()
        compile_update(setup.roles, setup.memory, self.config.memory_options, self.files.progress)
        seconds = time.perf_counter() - start
        notify(f"compiled in {seconds:.1f} s")
        return seconds

    def begin(self) -> Position:
        """Restores parameters, optimizer and cursor from the checkpoint, or initializes them."""
        config = self.config
        roles = self.setup.roles
        self.files.tell_changes()
        policy = roles.models[POLICY]
        checksums = freeze_bases(roles, config.seed)
        found = self.files.restore({"train": self.trainer.abstract_state})
        if found is None:
            state = self.trainer["init_state"](initial_params(policy, self.trainer, config.seed))
            begin_reference(roles, config.run_dir, state)
            return Position(0, state, Drawn(), checksums)
        step, saved, meta = found
        resume_reference(roles, config.run_dir, step)
        check_bases(meta, checksums, config.run_dir, roles.models, config.seed)
        with self.files.checkpoints.as_written(step):
            drawn = Drawn.from_json(meta)
            examples = meta["examples"]
        if examples != self.setup.examples.checksum:
            told = "resumed with other examples than before, or in another order"
            self.files.progress.print(told)
        return Position(step, saved["train"], drawn, checksums)

    def learn(self, begun: Position) -> Position:
        """Runs all steps that are left. Returns the position after the last."""
        position = begun
        whole = begun.whole(self.setup.examples.checksum)
        with steps_after(whole, self.files, self.signals) as steps:
            while position.step < self.setup.steps:
                position = self.iterate(steps, position)
            self.evaluate(steps, position)
        return position

    def iterate(self, steps: Steps, position: Position) -> Position:
        """Evaluates if that is due, and learns from one batch. Returns the position after it."""
        setup = self.setup
        clock = steps.clock
        if (every := self.config.eval.every) and position.step % every == 0:
            self.evaluate(steps, position)
        clock.reset()
        with clock("pack"):
            examples = setup.examples.draw(position.drawn.examples, self.config.batch_size)
            batch = self.lessons.batch(examples, setup.shapes)
        with self.signals.held():  # from here on the step is completed before a stop
            with clock("update"):
                batch = setup.roles.read(batch)
                state, result = self.trainer.update(position.state, batch)
            step = position.step + 1
            drawn = position.drawn.plus(examples)
            position = replace(position, step=step, state=state, drawn=drawn)
            measured: dict[str, Any] = dict(result.metrics)
            steps.learned(position.whole(setup.examples.checksum), measured)
            rate = self.learning_rate(max(0, result.updates_applied - 1))
            measured["train/learning_rate"] = float(rate)
            measured["train/padding_efficiency"] = batch.padding_efficiency
            measured |= self.describe(examples, clock.seconds["update"])
            measured |= drawn.metrics(len(setup.examples))
            self.skipped.note(step, result.applied)
            measured |= describe_memory(setup.devices)
            steps.write(step, measured)
            steps.end(step, measured)
        return position

    def describe(self, examples: Sequence[Any], seconds: float) -> dict[str, float]:
        """Returns the metrics of an update that took `seconds`."""
        lengths = self.lessons.lengths(examples)
        flops = flops_of(self.trainer.trained, lengths)
        speed = describe_update(self.setup.devices, lengths, seconds=seconds, flops=flops)
        return speed | {"train/tokens_in_loss": self.lessons.num_in_loss(examples)}

    def evaluate(self, steps: Steps, position: Position) -> None:
        """Measures and prints the loss and the other metrics on held-out examples."""
        if self.setup.heldout is None:
            return
        start = time.perf_counter()
        batch = self.trainer.predict(position.state, self.setup.roles.read(self.setup.heldout))
        measured: dict[str, Any] = dict(self.lessons.measure(batch, self.trainer.old))
        measured["eval/seconds"] = time.perf_counter() - start
        steps.metrics.write(position.step, measured)
        self.files.page.write()
        words = self.lessons.words(measured, len(self.lessons.heldout))
        self.files.progress.print(f"step {position.step}: {words}")

    def finish(self, begun: Position, ended: Position, compile_s: float) -> None:
        """Saves and exports what was learned, and prints a summary."""
        config = self.config
        if ended.step > begun.step:
            with self.signals.held():
                self.files.save_last()
        self.files.close()
        if config.checkpoint.export_dir:
            tokenizer = tokenizer_dir(config.model, self.setup.policy.config)
            is_scored = self.lessons.HEAD == "scalar"
            padding = padding_of(HuggingFaceTokenizer(tokenizer)) if is_scored else None
            export_role(
                self.setup.roles.models[POLICY],
                self.trainer.trained,
                ended.state.params,
                ended.step,
                config.run_dir,
                base=config.model,
                tokenizer_dir=tokenizer,
                padding=padding,
            )
        self.files.tell_end(compile_s)
