"""Batches whose gradient is not finite: nothing is learned of them, they are kept, and too many in a row
end a run."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from arrays import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from runs import TINY

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.train_batch import MicroBatch, TrainBatch
from pat_jax.run import learning
from pat_jax.run.checkpoints.skipped_steps import FOLDER, NonFiniteSteps
from pat_jax.run.learning import training_batch
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.loop import learn
from pat_jax.run.opened import files_of, opened
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.scoring import open_scorer
from pat_jax.run.start.setup import build


def micro(value: int) -> MicroBatch:
    rows = np.full((2, 3), value, np.int32)
    return MicroBatch(rows, rows, rows, rows / 2, {"advantages": np.full((2, 3), np.nan)})


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), max_size=8), st.integers(0, 4))
def test_it_ends_with_the_first_row_that_is_too_long(tmp_path_factory, steps, most):
    skipped = NonFiniteSteps(tmp_path_factory.mktemp("run"), most, lambda _: None)
    before = ""
    for number, applied in enumerate(steps):
        before += "".join(" " if one else "x" for one in applied)
        longest = max(map(len, before.split()), default=0)
        if longest > most:
            with pytest.raises(UserError, match=f"{longest} optimizer steps in a row"):
                skipped.note(number, [[micro(0)]], applied)
            return
        skipped.note(number, [[micro(0)]], applied)


def test_what_was_to_be_learned_is_there_to_be_looked_into(tmp_path: Path):
    output: list[str] = []
    skipped = NonFiniteSteps(tmp_path, 3, output.append)
    # Two optimizer steps, gone through twice.
    skipped.note(1, [[micro(1), micro(2)], [micro(3)]], [True] * 4)
    assert not output and not (tmp_path / FOLDER).exists()
    skipped.note(2, [[micro(1), micro(2)], [micro(3)]], [True, True, False, True])
    path = tmp_path / FOLDER / "step-2.npz"
    assert output == [
        "step 2: 1 of 4 optimizer steps left out, their gradient not finite (NaN or infinite); what they "
        f"were to learn is in {path}"
    ]
    found = np.load(path)
    names = ("tokens", "positions", "weights", "responses", "advantages")
    assert set(found) == {f"0.{j}.{name}" for j in range(2) for name in names}
    np.testing.assert_array_equal(found["0.1.tokens"], micro(2).tokens)
    np.testing.assert_array_equal(found["0.0.weights"], micro(1).weights)
    assert np.isnan(found["0.0.advantages"]).all()


def test_the_newest_few_are_kept_and_a_disk_that_takes_none_ends_nothing(tmp_path: Path):
    output: list[str] = []
    skipped = NonFiniteSteps(tmp_path, 2, output.append)
    for step in range(9, 14):
        skipped.note(step, [[micro(step)]], [False])
        skipped.note(step, [[micro(step)]], [True])
    kept = {path.name for path in (tmp_path / FOLDER).iterdir()}
    assert kept == {"step-12.npz", "step-13.npz"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FOLDER).write_text("in the way")
    NonFiniteSteps(tmp_path / "other", 2, output.append).note(1, [[micro(1)]], [False])
    assert output[-1].endswith("not finite (NaN or infinite)")


def test_the_sentence_that_ends_a_run(tmp_path: Path):
    with pytest.raises(UserError) as error:
        NonFiniteSteps(tmp_path, 0, lambda _: None).note(7, [[micro(0)]], [False])
    output = str(error.value)
    assert "\n" not in output and "the last in step 7; what they were to learn is in " in output
    assert "expected at most 0; lower --optimizer.learning_rate, or resume" in output


class Spoilt:
    """From the second iteration on, advantages that are no numbers."""

    def __init__(self) -> None:
        self.states: list[TrainState] = []
        self.batches: list[TrainBatch] = []

    def __call__(self, algorithm, scored, rewards, read, **options) -> Any:
        batch, measured = training_batch(algorithm, scored, rewards, read, **options)
        if self.states:
            rollouts = [one for group in scored.groups for one in group.rollouts]
            nan = [np.full(len(one.tokens), np.nan) for one in rollouts]
            batch = batch.with_column("advantages", nan)
        (states,) = read.args
        self.states.append(jax.device_get(states["train"]))
        self.batches.append(batch)
        return batch, measured


@pytest.mark.slow  # a run; one of `test_sft.py` ends as well
def test_optimizer_steps_in_a_row_without_a_gradient_end_a_run(tmp_path, monkeypatch, capsys):
    """Two of each iteration; at most three are borne."""
    options = ["--run_dir", str(tmp_path), "--steps", "9", "--eval.every", "0"]
    options += ["--warm_start.steps", "0", "--algorithm.mini_batch_size", "2"]
    options += ["--layout", "dp2tp1", "--rollout.compile", "needed"]
    config = parse([*TINY, *options])
    poisoned = Spoilt()
    monkeypatch.setattr(learning, "training_batch", poisoned)
    monkeypatch.setattr(learning, "MOST_IN_A_ROW", 3)
    setup = build(config, jax.devices()[: config.devices])
    with open_scorer(setup.task.rewards, config.reward_limits) as scorer:
        signals = StopSignals()
        with files_of(setup, signals) as files, opened(setup, scorer, signals, files) as run:
            words = r"4 optimizer steps in a row .* the last in step 3; "
            with pytest.raises(UserError, match=words):
                learn(run)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["train/skipped_updates"]) for row in rows] == [(1, 0), (2, 2), (3, 2)]
    assert "step 2: 2 of 2 optimizer steps left out" in capsys.readouterr().err
    # What was learned before is as it was.
    assert [state.step for state in poisoned.states] == [0, 2, 2]
    assert_same_bits(jax.device_get(run.learner.state), poisoned.states[1])
    for step, batch in enumerate(poisoned.batches[1:], start=2):
        kept = np.load(tmp_path / "skipped" / f"step-{step}.npz")
        assert len(batch.mini_batches) == 2
        for i, mini in enumerate(batch.mini_batches):
            for j, micro in enumerate(mini):
                np.testing.assert_array_equal(kept[f"{i}.{j}.tokens"], micro.tokens)
                assert np.isnan(kept[f"{i}.{j}.advantages"]).any()
