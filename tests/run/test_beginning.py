"""What a resumed run goes on from, and what it says of problems that are others than before."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from pat_jax.config.command_line import parse
from pat_jax.config.role_table import role_table
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.data.epochs import Cursor
from pat_jax.rl.data.problems import Problems
from pat_jax.run.start.heldout import HeldoutSet
from pat_jax.run.start.init_state import _resumed
from pat_jax.run.start.task import Task


def prompts(count: int, answer: str = "1") -> list[Prompt]:
    return [Prompt(i, (i,), str(i), {"answer": answer}) for i in range(count)]


def task(train: list[Prompt], heldout: list[Prompt]) -> Task:
    problems = Problems(train, seed=0, name="some")
    return Task(TOKENIZER, ["exact"], problems, [HeldoutSet("heldout", heldout)], None, ["answer"])


def resumed(now: Task, **meta: Any):
    """What the run has of a checkpoint after three steps, and what it says."""
    output: list[str] = []
    checkpoints = SimpleNamespace(as_written=lambda step: nullcontext())
    progress = SimpleNamespace(print=output.append)
    run: Any = SimpleNamespace(progress=progress, checkpoints=checkpoints)
    config = parse(["--rollout.prompts_per_step", "4", "--algorithm.mini_batch_size", "4"])
    models = {role.name: SimpleNamespace(role=role) for role in role_table(config, "cpu")}
    setup: Any = SimpleNamespace(task=now, config=config, roles=SimpleNamespace(models=models))
    known = {"lengths": LengthModel.empty(8).to_json(), "base_checksum": None, **meta}
    found = 3, {"train": "state"}, known
    return _resumed(setup, run, found, {"base_checksum": None}), output


BEFORE = task(prompts(40), prompts(5))
OPTIONS = {"config": "rollout: {prompts_per_step: 8}"}


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (task(prompts(40), prompts(5)), []),
        (task(prompts(40)[::-1], prompts(5)), ["other problems than before"]),
        (task(prompts(40, answer="2"), prompts(5)), ["other problems than before"]),
        (task(prompts(41), prompts(5, "3")), ["other problems than", "other held-out problems"]),
    ],
)
def test_changed_problems_are_said_in_a_sentence_each(now: Task, words: list[str]):
    _, output = resumed(now, problems=BEFORE.checksums, cursor={"epoch": 1, "offset": 12})
    assert len(output) == len(words)
    for line, part in zip(output, words, strict=True):
        assert part in line and "\n" not in line


def test_it_goes_on_behind_what_was_drawn_with_another_batch_size_too():
    began, _ = resumed(BEFORE, cursor={"epoch": 1, "offset": 12}, batches_drawn=9, tokens_drawn=50)
    assert began.totals.cursor == Cursor(1, 12)
    assert (began.totals.batches, began.totals.tokens, began.steps_done) == (9, 50, 3)


def test_older_checkpoints_go_on_and_know_of_no_change():
    began, output = resumed(task(prompts(40), prompts(9)), batches_drawn=7, **OPTIONS)
    assert began.totals.cursor == Cursor(1, 16) and not output  # of five batches of 8 an epoch
