"""A run that is killed at random moments and resumed is, bit for bit, the run that was not."""

import json
import random
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from arrays import assert_same_bits
from runs import TINY, finish, run, saved_run, start, without_times

from pat_jax.config.command_line import parse
from pat_jax.config.role_table import role_table
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.data.epochs import Cursor
from pat_jax.rl.data.problems import Problems
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.start.heldout import HeldoutSet
from pat_jax.run.start.init_state import _resumed
from pat_jax.run.start.task import Task
from pat_jax.run.start.totals import Totals

STEPS = 12
FEW = 4  # requests of a rollout's eight
OPTIONS = [
    *TINY,
    "--deterministic",
    *("--seed", "3"),
    *("--warm_start.steps", "0"),  # random weights end by chance: lengths differ
    *("--rollout.burst_steps", "8"),
    *("--optimizer.learning_rate", "1e-3"),
    *("--optimizer.schedule", "cosine"),
    *("--algorithm.beta", "0.01"),
    *("--algorithm.dynamic_sampling", "2"),
]
# By lengths some groups teach and some do not: how many batches an iteration draws differs.
REWARD = """
def score(prompts, completions, **columns):
    return [float(len(text) % 2) for text in completions]
"""


def prefer_tensor_parallelism_for_few(profile: Path) -> None:
    """A profile by which a switch pays in every rollout, whatever this machine measures.

    It may hold rows that other runs of this model have measured.
    """
    content = json.loads(profile.read_text())
    measured = LatencyModel.from_json(content["latency"])
    doctored = replace(
        measured,
        decode_table={
            (split, rows, length): 0.1 if split.tp == 1 else 0.001 if rows <= FEW else 1.0
            for split, rows, length in measured.decode_table
        },
        reshard_table=dict.fromkeys(measured.reshard_table, 1e-4),
        migrate_table=dict.fromkeys(measured.migrate_table, 1e-4),
    )
    profile.write_text(json.dumps(content | {"latency": doctored.to_json()}))


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A run that has compiled and profiled, and not taken a step."""
    folder = tmp_path_factory.mktemp("runs") / "begun"
    (folder.parent / "reward.py").write_text(REWARD)
    reward = ["--reward", f"{folder.parent / 'reward.py'}:score"]
    run(*OPTIONS, *reward, "--steps", "0", "--eval.every", "0", "--run_dir", str(folder))
    prefer_tensor_parallelism_for_few(folder / "profile.json")
    return folder


def continued(folder: Path) -> list[str]:
    reward = next(
        line for line in (folder / "config.yaml").read_text().splitlines() if ":score" in line
    )
    asked = [*("--steps", str(STEPS), "--eval.every", "4"), "--reward", reward.strip(" -")]
    return ["--run_dir", str(folder), "--resume", *asked]


def kill_at_random(folder: Path, after: int, moment: random.Random) -> None:
    """SIGKILL, up to a second after the step `after` of this process has been written."""
    process = start(*continued(folder))
    metrics = folder / "metrics.jsonl"
    before = len(metrics.read_text().splitlines())
    while len(metrics.read_text().splitlines()) < before + after:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    time.sleep(moment.random())
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(begun: Path, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    shutil.copytree(begun, whole)
    shutil.copytree(begun, killed)
    run(*continued(whole))
    seed = time.time_ns()
    print(f"random moments from seed {seed}")
    moment = random.Random(seed)
    for _ in range(3):
        kill_at_random(killed, moment.randrange(1, 4), moment)
    finish(start(*continued(killed)))

    lines = (killed / "metrics.jsonl").read_text()
    assert lines.count('"resume"') >= 3  # one a process
    expected = read_metrics(whole / "metrics.jsonl")
    assert [row["step"] for row in expected] == list(range(STEPS + 1))
    assert sum(row.get("rollout/switches", 0) for row in expected) >= STEPS / 2
    assert len({row["train/loss"] for row in expected[1:]}) == STEPS
    assert len({row["rollout/batches"] for row in expected[1:]}) > 1
    assert without_times(read_metrics(killed / "metrics.jsonl")) == without_times(expected)
    one, other = saved_run(whole), saved_run(killed)
    assert one[2] == other[2] == STEPS
    assert_same_bits(one[1], other[1])


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
    known = {
        "lengths": LengthModel.empty(8).to_json(),
        "problems": now.checksums,
        "base_checksum": None,
        **Totals(3, 20).to_json(),
        **meta,
    }
    found = 3, {"train": "state"}, known
    return _resumed(setup, run, found, {"base_checksum": None}), output


BEFORE = task(prompts(40), prompts(5))


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
