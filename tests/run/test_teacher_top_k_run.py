"""A run that learns from its teacher's likeliest tokens, from the options to the metrics."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import TINY, presets_of_one_layer, run_to_end

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.start.setup import Setup, build

OPTIONS = """
    --layout dp1tp2 --seed 3 --warm_start.steps 2 --eval.every 0 --steps 4
    --algorithm.name distill --optimizer.learning_rate 1e-2
"""


@pytest.fixture(autouse=True, scope="module")
def one_layer() -> Iterator[None]:
    with presets_of_one_layer("tiny"):
        yield


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model with the demonstration's tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    policy = Policy.from_config(preset("tiny", vocab_size=43))  # as many tokens as arithmetic has
    export(folder, policy, policy.init(11), jnp.float32)
    return folder


def setup(teacher: Path, run_dir: Path, *more: str) -> Setup:
    asked = ["--teacher.model", str(teacher), "--run_dir", str(run_dir)]
    config = parse([*TINY, *OPTIONS.split(), *asked, *more])
    return build(config, jax.devices()[: config.devices])


@pytest.mark.slow  # `training/test_teacher_top_k.py` has the updates
def test_the_policy_comes_nearer_to_its_teacher(teacher: Path, tmp_path: Path):
    made = setup(teacher, tmp_path / "run", "--teacher.top_k", "8")
    assert not made.trainer.predicts  # no pass of the policy before its update
    run_to_end(made)
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    apart = [row["train/teacher_kl"] for row in rows]
    assert np.isfinite(apart).all() and apart[0] > apart[-1] > 0
    # Rewards teach nothing: the loss is the KL.
    assert [row["train/loss"] for row in rows] == pytest.approx(apart, rel=1e-5)


def test_more_tokens_than_the_vocabulary_has_are_refused(teacher: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"--teacher\.top_k is 50: expected at most 43, the tokens"):
        setup(teacher, tmp_path / "run", "--teacher.top_k", "50")
