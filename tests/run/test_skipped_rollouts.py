"""A run of reinforcement learning whose loss becomes no number: nothing is learned, all is kept, it ends."""

from typing import Any

import jax
import numpy as np
import pytest
from arrays import assert_same_bits
from runs import TINY

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.run import learning
from pat_jax.run.learning import training_batch
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.loop import Run
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.scoring import open_scorer
from pat_jax.run.setup import build


class Spoilt:
    """From the second iteration on, advantages that are no numbers."""

    def __init__(self) -> None:
        self.states: list[TrainState] = []
        self.batches: list[TrainBatch] = []

    def __call__(self, config, trainer, shapes, groups, rewards, *policies) -> Any:
        batch, measured = training_batch(config, trainer, shapes, groups, rewards, *policies)
        if self.states:
            rollouts = [one for group in groups for one in group.rollouts]
            nan = [np.full(len(one.tokens), np.nan) for one in rollouts]
            batch = batch.with_column("advantages", nan)
        self.states.append(jax.device_get(policies[0]))
        self.batches.append(batch)
        return batch, measured


def test_optimizer_steps_in_a_row_without_a_gradient_end_a_run(tmp_path, monkeypatch, capsys):
    """Two of each iteration; at most three are borne."""
    options = ["--run_dir", str(tmp_path), "--steps", "9", "--eval.every", "0"]
    options += ["--warm_start.steps", "0", "--algorithm.mini_batch_size", "2"]
    config = parse([*TINY, *options, "--optimizer.max_skipped", "3"])
    spoilt = Spoilt()
    monkeypatch.setattr(learning, "training_batch", spoilt)
    setup = build(config, jax.devices()[: config.devices])
    with open_scorer(config, setup.task.rewards) as scorer:
        run = Run(setup, scorer, StopSignals())
        with pytest.raises(UserError, match=r"4 optimizer steps in a row .* the last in step 3; "):
            run.run()
        run.open.release()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["train/skipped_updates"]) for row in rows] == [(1, 0), (2, 2), (3, 2)]
    assert "step 2: 2 of 2 optimizer steps left out" in capsys.readouterr().err
    # What was learned before is as it was.
    assert [state.step for state in spoilt.states] == [0, 2, 2]
    assert_same_bits(jax.device_get(run.learner.state), spoilt.states[1])
    for step, batch in enumerate(spoilt.batches[1:], start=2):
        kept = np.load(tmp_path / "skipped" / f"step-{step}.npz")
        assert len(batch.mini_batches) == 2
        for i, mini in enumerate(batch.mini_batches):
            for j, micro in enumerate(mini):
                np.testing.assert_array_equal(kept[f"{i}.{j}.tokens"], micro.tokens)
                assert np.isnan(kept[f"{i}.{j}.advantages"]).any()
