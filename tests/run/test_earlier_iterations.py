"""Earlier responses and a head of first layers, beside checkpoints: there again, or it is said why not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollouts
from hypothesis import given
from hypothesis import strategies as st
from runs import SMALL_ROLLOUT, run, without_times, write_checkpoint, write_problems

from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.rl.batches.types import FinishReason, Prompt, RolloutGroup
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.checkpoints.side_files import SideFiles, as_bytes, of_bytes
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.roles.saved_policy import SavedPolicy
from pat_jax.run.start import exit_head_state
from pat_jax.run.start.earlier_texts import FOLDER, EarlierIterations, put_arrays, to_arrays
from pat_jax.run.start.exit_head_state import LearnedHead, saved_head

BOUNDS = 1000, 100, 2
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
stores = st.lists(st.tuples(tokens, st.lists(tokens, max_size=3)), max_size=6)


def filled(many) -> EarlierResponses:
    store = EarlierResponses(*BOUNDS)
    for prompt, output in many:
        store.put(prompt, [np.array(x, np.int32) for x in output])
    return store


SOME = [((5, 6), [[1, 2, 3], [4]]), ((7,), [[8, 9]])]


@given(stores)
def test_what_is_written_is_read(many):
    store, other = filled(many), EarlierResponses(*BOUNDS)
    put_arrays(of_bytes(as_bytes(to_arrays(store, 3))), 3, other)
    assert other.checksum == store.checksum and len(other) == len(store)


@given(st.data())
def test_any_damage_is_found(data: st.DataObject):
    whole = as_bytes(to_arrays(filled(SOME), 3))
    if data.draw(st.booleans(), label="cut"):
        content = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
        content = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    with pytest.raises(ValueError, match=r"^is damaged"):
        of_bytes(content)


def iterations(folder: Path, tokenizer: int = 3) -> EarlierIterations:
    files = SideFiles(folder, FOLDER, "responses")
    return EarlierIterations(files, tokenizer, EarlierResponses(*BOUNDS))


def group(number: int, *output: str) -> RolloutGroup:
    return rollouts.group_of(map(TOKENIZER.encode, output), Prompt(number, (number,), "", {}))


def test_an_iteration_is_kept_and_comes_back(tmp_path: Path):
    one, other = iterations(tmp_path), iterations(tmp_path)
    ended, cut = group(4, "12", "3").rollouts
    cut = replace(cut, finish=FinishReason.LENGTH)  # as good to copy from, and the long ones
    one.put([RolloutGroup(ended.prompt, (ended, cut)), group(5, "7")])
    one.put([group(4, "45")])
    one.save(2)
    assert other.restore(2) == ""
    assert other.responses.checksum == one.responses.checksum
    output = [TOKENIZER.decode(x.tolist()) for x in other.responses.of([4])]
    assert output == ["45", "12", "3"]


def test_what_cannot_be_read_is_one_sentence_and_an_empty_beginning(tmp_path: Path):
    one = iterations(tmp_path)
    one.put([group(4, "12")])
    one.save(2)
    path = tmp_path / FOLDER / "step-2.bin"
    (tmp_path / FOLDER / "step-4.bin").mkdir()
    (tmp_path / FOLDER / "step-5.bin").write_bytes(path.read_bytes()[:-1])
    for step, tokenizer, why in [
        (2, 4, "is of another tokenizer than this run's"),
        (3, 3, "is not there"),
        (4, 3, "is no file"),
        (5, 3, "is damaged (it has another checksum than when it was written)"),
    ]:
        found = iterations(tmp_path, tokenizer)
        output = found.restore(step)
        assert output.startswith(f"{tmp_path / FOLDER}/step-{step}.bin {why}: expected ")
        assert output.count(". ") == 0 and output.endswith("nothing else is lost.")
        assert not len(found.responses)


def test_files_go_when_their_checkpoints_have_gone(tmp_path: Path):
    one = iterations(tmp_path)
    for step in (1, 2, 3):
        (tmp_path / CHECKPOINTS / str(step)).mkdir(parents=True)
        one.save(step)
    shutil.rmtree(tmp_path / CHECKPOINTS / "1")
    one.save(4)
    found = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert found == ["step-2.bin", "step-3.bin", "step-4.bin"]


def test_a_disk_that_takes_nothing_costs_no_checkpoint(tmp_path: Path):
    (tmp_path / FOLDER).write_text("in the way")
    iterations(tmp_path).save(1)


def draft_for_nothing(profile: Path) -> None:
    """A profile by which drafts always pay, whatever this machine measures."""
    told = json.loads(profile.read_text())
    measured = LatencyModel.from_json(told["latency"])
    assert measured.verify_table
    doctored = replace(measured, verify_table=dict.fromkeys(measured.verify_table, 1e-9))
    profile.write_text(json.dumps(told | {"latency": doctored.to_json()}))


@pytest.mark.slow  # processes that compile
def test_a_resumed_run_drafts_what_the_whole_one_does(tmp_path: Path):
    model = write_checkpoint(tmp_path / "model")
    data = write_problems(tmp_path / "sums.jsonl", count=4)  # all of them in every iteration
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    options = ["--model", str(model), "--data", str(data), *SMALL_ROLLOUT, "--eval.every", "0"]
    options += ["--rollout.max_prompt_length", "120", "--layout", "dp2tp1", "--deterministic"]
    options += ["--speculation.source", "suffix", "--reward", "exact"]
    options += ["--rollout.temperature", "0.2"]
    run(*options, "--steps", "0", "--run_dir", str(whole))
    draft_for_nothing(whole / "profile.json")
    shutil.copytree(whole, halved)

    def go_on(folder: Path, steps: int) -> str:
        return run("--resume", "--run_dir", str(folder), "--steps", str(steps))

    assert "none of earlier iterations yet" in go_on(whole, 4)
    go_on(halved, 2)
    assert "16 of earlier iterations to 4 prompts" in go_on(halved, 4)
    halves, rows = (without_times(read_metrics(x / "metrics.jsonl")) for x in (halved, whole))
    assert halves == rows
    assert all(row["rollout/accepted"] > 0 for row in rows if row["step"] > 1)
    assert sorted(path.name for path in (whole / FOLDER).iterdir()) == ["step-2.bin", "step-4.bin"]

    path = halved / FOLDER / "step-4.bin"
    path.write_bytes(path.read_bytes()[:-4])
    output = go_on(halved, 5)
    assert f"{path} is damaged" in output and "none of earlier iterations yet" in output
    assert "resumed after step 4" in output and "checkpoint of step 4 is damaged" not in output
    shutil.rmtree(whole / FOLDER)  # as of a version that kept none
    assert "step-4.bin is not there" in go_on(whole, 5)


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
    return LearnedHead(learner, SideFiles(run, exit_head_state.FOLDER, "heads of first layers"))


def test_a_resumed_run_goes_on_with_it(tmp_path: Path):
    kept(tmp_path, value=3).save(20)
    other = kept(tmp_path)
    assert other.restore(20) == ""
    state: Any = other.trainer.state
    assert (state.params == 3).all() and state.step == 3
    kept(tmp_path, value=5).save(30)  # there is no checkpoint of step 20
    assert [path.name for path in (tmp_path / exit_head_state.FOLDER).iterdir()] == ["step-30.bin"]


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


def drafting_with(depth: int, embed: int = 4) -> Any:
    """Of an engine what is looked at."""
    return SimpleNamespace(
        specs=SimpleNamespace(drafts=SimpleNamespace(exit_layer=depth)),
        policy=SimpleNamespace(config=SimpleNamespace(embed_dim=embed)),
    )


def policy_at(run: Path, step: int) -> SavedPolicy:
    return SavedPolicy(run / CHECKPOINTS / str(step), {}, {}, ())


def test_those_who_only_generate_draft_with_the_head_of_the_checkpoint(tmp_path: Path):
    for step in (20, 30):
        (tmp_path / CHECKPOINTS / str(step)).mkdir(parents=True)
        kept(tmp_path, value=step).save(step)
    for step in (20, 30):
        head, why = saved_head(policy_at(tmp_path, step), drafting_with(3))
        assert head is not None and (head == step).all() and head.shape == (4, 4) and why == ""
    assert saved_head(policy_at(tmp_path, 20), drafting_with(0)) == (None, "")  # nobody asks for it


@pytest.mark.parametrize(
    "step, drafting, why",
    [
        (30, drafting_with(3), "is not there"),
        (20, drafting_with(2), "is the head behind layer 3"),
        (20, drafting_with(3, embed=8), "is the head of another model"),
        (40, drafting_with(3), "is damaged"),
    ],
    ids=["none", "layer", "model", "damaged"],
)
def test_where_there_is_none_for_them_it_is_said(tmp_path: Path, step: int, drafting, why: str):
    kept(tmp_path, value=3).save(20)
    path = tmp_path / exit_head_state.FOLDER / "step-20.bin"
    (tmp_path / exit_head_state.FOLDER / "step-40.bin").write_bytes(path.read_bytes()[:-1])
    head, output = saved_head(policy_at(tmp_path, step), drafting)
    assert head is None and output.startswith(
        f"{tmp_path / exit_head_state.FOLDER}/step-{step}.bin {why}"
    )
    assert output.count(". ") == 0 and output.endswith(
        "with one of zeros, and the tokens stay the same."
    )
