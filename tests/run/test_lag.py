"""Runs that learn from batches of the policy one update older, and generate the next one meanwhile."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from compilations import counted_in_iterations
from runs import TINY, presets_of_one_layer, run_to_end

from pat_jax.common.timeline import Span, recorded
from pat_jax.config.command_line import parse
from pat_jax.rl.batches.batches import to_read_batch
from pat_jax.run.checkpoints.files import checkpoints_in
from pat_jax.run.collect import Collector, Experience
from pat_jax.run.generation import Generator
from pat_jax.run.learning import Learned, Learner
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.process.stop_signals import Stopped, StopSignals
from pat_jax.run.start.setup import build
from pat_jax.training.trainer import Trainer

STEPS = 4
OPTIONS = f"""
    --devices 4 --placement separate --layout dp2tp1 --steps {STEPS} --warm_start.steps 0
    --algorithm.num_iterations 2 --algorithm.rollout_correction token_truncate
    --optimizer.learning_rate 1e-2 --eval.every 2 --checkpoint.every 100
"""
LAG = "--placement.lag", "1"
REWARD = "def score(completions, **_):\n    return [float(len(x) % 7) for x in completions]\n"
WAIT_S = 60.0


@dataclass
class Seen:
    """What was generated and learned from."""

    tokens: list[list[list[int]]] = field(default_factory=list)  # of each rollout's responses
    prompts: list[list[int]] = field(default_factory=list)  # of each rollout, begun ones included
    policies: list[int] = field(default_factory=list)  # of each rollout, by checksum
    old_gaps: list[float] = field(default_factory=list)  # of each update, as `differs_from_own`
    threads: list[str] = field(default_factory=list)  # of updates
    compiled: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def on_response(self, rollout: int) -> None:
        """Called as a rollout's first response has ended."""

    def on_collected(self, number: int) -> None:
        """Called when a batch, from 1, has its rewards."""

    def on_update(self, number: int) -> None:
        """Called as an update, from 1, begins."""


def trained(folder: Path, *options: str, seen: Seen | None = None) -> Seen:
    """Runs to the end in this process."""
    seen = seen or Seen()
    (reward := folder.parent / "reward.py").write_text(REWARD)
    given = [*OPTIONS.split(), "--reward", f"{reward}:score", "--run_dir", str(folder)]
    config = parse([*TINY, *given, *options])
    with presets_of_one_layer("tiny"), watched(seen), StopSignals() as signals:
        setup = build(config, jax.devices()[: config.devices])
        with counted_in_iterations() as compiled, recorded() as timeline:
            try:
                run_to_end(setup, signals)
            finally:
                seen.compiled.extend(map(str, compiled))
                seen.spans.extend(timeline.take())
    return seen


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    rollout, collect = Generator.rollout, Collector.collect
    learn, update = Learner.learn, Trainer.update

    def watched_rollout(self: Generator, prompts: Any, number: int, on_finish: Any, kept: Any):
        seen.prompts.append([x.id for x in prompts])
        seen.policies.append(self.policy)
        count = 0

        def noted(index: int, ended: Any) -> None:
            nonlocal count
            count += 1
            if count == 1:
                seen.on_response(number)
            on_finish(index, ended)

        groups, report = rollout(self, prompts, number, noted, kept)
        seen.tokens.append([x.tokens.tolist() for group in groups for x in group.rollouts])
        return groups, report

    def watched_collect(self: Collector, *args: Any) -> Experience:
        found = collect(self, *args)
        seen.on_collected(len(seen.tokens))
        return found

    def watched_learn(self: Learner, found: Experience) -> Learned:
        if "old_logprobs" in found.scored.columns:
            seen.old_gaps.append(differs_from_own(self, found))
        return learn(self, found)

    def watched_update(self: Trainer, *state_and_batch: Any):
        seen.threads.append(threading.current_thread().name)
        seen.on_update(len(seen.threads))
        return update(self, *state_and_batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", watched_update)
        patch.setattr(Collector, "collect", watched_collect)
        patch.setattr(Generator, "rollout", watched_rollout)
        patch.setattr(Learner, "learn", watched_learn)
        yield


def differs_from_own(learner: Learner, found: Experience) -> float:
    """The largest difference between the old log-probabilities and those of the present policy."""
    rollouts = [x for group in found.scored.groups for x in group.rollouts]
    batch = to_read_batch(rollouts, learner._roles.micro_shapes)
    batch = learner._roles.predict(learner.states, batch)
    early = found.scored.columns["old_logprobs"]
    pairs = zip(batch.by_response("old_logprobs"), early, strict=True)
    return max(float(np.abs(own - old).max()) for own, old in pairs)


class Together(Seen):
    """Neither an update nor the rollout beside it goes on until the other has begun."""

    def __init__(self):
        super().__init__()
        self._both = threading.Barrier(2)

    def on_response(self, rollout: int) -> None:
        if rollout:
            self._both.wait(WAIT_S)

    def on_update(self, number: int) -> None:
        if number < STEPS:
            self._both.wait(WAIT_S)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]


def spans(seen: Seen, name: str) -> list[Span]:
    return [span for span in seen.spans if span.name == name]


def threads() -> Sequence[str]:
    return [x.name for x in threading.enumerate() if x.name.startswith("reads")]


@pytest.mark.slow  # three runs
def test_a_batch_is_sampled_from_the_policy_before_the_update_that_goes_on(tmp_path: Path):
    late = trained(tmp_path / "late", *LAG, seen=Together())
    fixed = trained(tmp_path / "fixed", "--steps", "2", "--optimizer.learning_rate", "0")
    newest = trained(tmp_path / "newest", "--steps", "2")

    assert late.tokens[:2] == fixed.tokens and late.tokens[1] != newest.tokens[1]
    first, *others = late.policies  # one more update before each batch but the first two
    assert others[0] == first and len({first, *others[1:]}) == STEPS - 1
    assert late.compiled == [] and len(late.tokens) == STEPS and threads() == []
    assert all(name.startswith("reads") for name in late.threads)
    assert {*newest.threads} == {"MainThread"}
    assert len(late.old_gaps) == STEPS
    assert max(late.old_gaps) < 1e-5  # of the policy that learns, not of the one that sampled

    found = rows(tmp_path / "late")
    assert [row["rollout/lag"] for row in found] == [0, 1, 1, 1]
    assert [row["step"] for row in found if "eval/reward" in row] == [2, 4]
    gaps = [row["train/behavior_gap"] for row in found]
    assert gaps[0] < 1e-4 < 1e-3 < min(gaps[1:])
    corrections = [row["train/correction_mean"] for row in found]
    assert abs(corrections[0] - 1) < 1e-4 < min(abs(x - 1) for x in corrections[1:])
    assert all(np.isfinite(row["train/loss"]) for row in found)
    assert "rollout/lag" not in rows(tmp_path / "newest")[0]

    rollout = spans(late, "rollout")[-1]
    update = spans(late, "update of the policy")[-2]  # by the batch before that rollout
    assert rollout.devices == {*jax.devices()[:2]} and update.devices == {*jax.devices()[2:4]}
    assert rollout.begin_s < update.end_s and update.begin_s < rollout.end_s


class StoppedInThird(Seen):
    """A signal comes while the third batch is generated."""

    def on_response(self, rollout: int) -> None:
        if rollout == 2:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow  # two runs
def test_a_stopped_run_completes_its_update_and_goes_on_with_the_same_prompts(tmp_path: Path):
    folder = tmp_path / "run"
    with pytest.raises(Stopped):
        trained(folder, *LAG, seen=(stopped := StoppedInThird()))
    assert [x.name for x in checkpoints_in(folder / "checkpoints")] == ["2"] and threads() == []
    assert [row["step"] for row in rows(folder)] == [1, 2]

    resumed = trained(folder, *LAG, "--resume", "true")
    assert resumed.prompts[0] == stopped.prompts[2] != stopped.prompts[1]
    found = rows(folder)
    assert [(row["step"], row["rollout/lag"]) for row in found] == [(1, 0), (2, 1), (3, 0), (4, 1)]
    assert all(row["rollout/from_disk"] == 0 for row in found)
    assert [x.name for x in checkpoints_in(folder / "checkpoints")][-1] == "4"


class FailsInSecond(Seen):
    """The first update ends after the second batch is collected, and the second update fails."""

    def __init__(self):
        super().__init__()
        self._is_collected = threading.Event()

    def on_collected(self, number: int) -> None:
        if number == 2:
            self._is_collected.set()

    def on_update(self, number: int) -> None:
        assert self._is_collected.wait(WAIT_S)
        if number == 2:
            raise RuntimeError("a device has gone")


@pytest.mark.slow  # two runs
def test_an_error_of_an_update_ends_the_run_and_keeps_the_step_before(tmp_path, capsys):
    folder, options = tmp_path / "run", [*LAG, "--algorithm.num_iterations", "1"]
    with pytest.raises(RuntimeError, match="a device has gone"):
        trained(folder, *options, seen=(failed := FailsInSecond()))
    assert [x.name for x in checkpoints_in(folder / "checkpoints")] == ["1"]
    assert [row["step"] for row in rows(folder)] == [1] and threads() == []
    assert "the policy after step 1 is saved; go on with: " in capsys.readouterr().err

    # Of the two batches that were collected, one was learned from.
    resumed = trained(folder, *options, "--resume", "true")
    assert resumed.prompts[0] == failed.prompts[1] != failed.prompts[0]
    assert [row["rollout/lag"] for row in rows(folder)] == [0, 0, 1, 1]
