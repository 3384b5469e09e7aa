"""What a head of first layers has learned, beside the checkpoints of its run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.rl.algorithm.update import TrainState
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.checkpoints.side_files import SideFiles
from pat_jax.run.roles.saved_policy import SavedPolicy
from pat_jax.run.start.exit_head_state import FOLDER, LearnedHead, saved_head


class Learner:
    """Of a trainer what is looked at."""

    def __init__(self, size: int, value: float, depth: int):
        self.depth = depth
        head = np.full((size, size), value, np.float32)
        moments = {"mu": head + 10, "nu": head + 20}
        self.state: Any = TrainState(head, moments, jnp.int32(value))

    def take(self, leaves: list[np.ndarray]) -> None:
        self.state = jax.tree.unflatten(jax.tree.structure(self.state), leaves)


def kept(run: Path, size: int = 4, value: float = 0.0, depth: int = 3) -> LearnedHead:
    learner: Any = Learner(size, value, depth)
    return LearnedHead(learner, SideFiles(run, FOLDER, "heads of first layers"))


def test_a_resumed_run_goes_on_with_it(tmp_path: Path):
    kept(tmp_path, value=3).save(20)
    other = kept(tmp_path)
    assert other.restore(20) == ""
    state: Any = other.trainer.state
    assert (state.params == 3).all() and state.step == 3
    kept(tmp_path, value=5).save(30)  # there is no checkpoint of step 20
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step-30.bin"]


@pytest.mark.parametrize(
    "step, size, depth, why",
    [
        (30, 4, 4, "is not there"),
        (20, 3, 4, "is the head of another model"),
        (20, 4, 9, "is the head behind layer 4: expected the head of the policy's first 9 layers"),
    ],
)
def test_what_is_not_taken_is_said_and_a_run_begins_anew(tmp_path: Path, step, size, depth, why):
    kept(tmp_path, value=3, depth=4).save(20)
    other = kept(tmp_path, size, value=1, depth=depth)
    output = other.restore(step)
    state: Any = other.trainer.state
    assert why in output and output.count(". ") == 0 and "begins to learn anew" in output
    assert (
        output.endswith("nothing else is lost.") and (state.params == 1).all() and state.step == 1
    )


def engine(depth: int, embed: int = 4) -> Any:
    """Of an engine what is looked at."""
    return SimpleNamespace(
        specs=SimpleNamespace(drafts=SimpleNamespace(exit_layer=depth)),
        policy=SimpleNamespace(config=SimpleNamespace(embed_dim=embed)),
    )


def checkpoint(run: Path, step: int) -> SavedPolicy:
    return SavedPolicy(run / CHECKPOINTS / str(step), {}, {}, ())


def test_those_who_only_generate_draft_with_the_head_of_the_checkpoint(tmp_path: Path):
    for step in (20, 30):
        (tmp_path / CHECKPOINTS / str(step)).mkdir(parents=True)
        kept(tmp_path, value=step).save(step)
    for step in (20, 30):
        head, why = saved_head(checkpoint(tmp_path, step), engine(3))
        assert head is not None and (head == step).all() and head.shape == (4, 4) and why == ""
    assert saved_head(checkpoint(tmp_path, 20), engine(0)) == (None, "")  # nobody asks for it


@pytest.mark.parametrize(
    "step, drafting, why",
    [
        (30, engine(3), "is not there"),
        (20, engine(2), "is the head behind layer 3"),
        (20, engine(3, embed=8), "is the head of another model"),
        (40, engine(3), "is damaged"),
    ],
    ids=["none", "layer", "model", "damaged"],
)
def test_where_there_is_none_for_them_it_is_said(tmp_path: Path, step: int, drafting, why: str):
    kept(tmp_path, value=3).save(20)
    path = tmp_path / FOLDER / "step-20.bin"
    (tmp_path / FOLDER / "step-40.bin").write_bytes(path.read_bytes()[:-1])
    head, output = saved_head(checkpoint(tmp_path, step), drafting)
    assert head is None and output.startswith(f"{tmp_path / FOLDER}/step-{step}.bin {why}")
    assert output.count(". ") == 0 and output.endswith(
        "with one of zeros, and the tokens stay the same."
    )
