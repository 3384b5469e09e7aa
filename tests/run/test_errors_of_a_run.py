"""A run that an error ends has saved its last whole step, and resumed it is, bit for bit, the run that had
none; a run that is told to stop keeps what it has done, and its folder belongs to one process at a time."""

import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
from arrays import assert_same_bits
from runs import TINY, finish, run, saved_run, start, without_times

from pat_jax.run.checkpoints.checkpoint import DAMAGED
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.files.folder import CONFIG_FILE
from pat_jax.run.logging.metrics import read_metrics

OPTIONS = [
    *TINY,
    *("--deterministic", "--seed", "5", "--steps", "7", "--warm_start.steps", "0"),
    *("--rollout.burst_steps", "8", "--optimizer.learning_rate", "1e-3", "--eval.every", "3"),
    *("--checkpoint.every", "1000"),
]
# The command, in a process where the nth call of a function fails.
FAILING = """
import builtins, itertools, sys
from functools import reduce
from importlib import import_module

from pat_jax.common.errors import UserError

where, nth, error, *sys.argv[1:] = sys.argv[1:]
module, _, name = where.partition(":")
*owners, last = name.split(".")
owner = reduce(getattr, owners, import_module(module))
function, calls = getattr(owner, last), itertools.count()

def failing(*args, **options):
    if next(calls) == int(nth):
        raise {**vars(builtins), "UserError": UserError}[error]("of the test")
    return function(*args, **options)

setattr(owner, last, failing)
from pat_jax import train
from pat_jax.common.run_command import run_command

run_command(train.main)
"""
# Ends its process, and cannot be imported any more, where it is told to.
REWARD = """
import os
from pathlib import Path
BROKEN = Path(__file__).with_name("broken")
assert not BROKEN.exists()
count = 0

def score(completions, **columns):
    global count
    count += 1
    if count == 12 and BROKEN.with_name("breaks").exists():
        BROKEN.touch()
        os._exit(1)
    return [float(len(text) % 3) for text in completions]
"""
# What fails, in which of its calls, how, the exit code, and the step that is saved then.
ERRORS = [
    ("pat_jax.run.collect:wait_for_rewards", 1, "RuntimeError", 1, 1),
    ("pat_jax.engine.device_executor:DeviceExecutor.collect", 9, "KeyboardInterrupt", 130, None),
    ("pat_jax.run.learning:training_batch", 1, "MemoryError", 1, None),
    ("pat_jax.run.logging.progress:Progress.step", 0, "BrokenPipeError", 1, None),
    ("pat_jax.run.report:describe_memory", 0, "UserError", 2, None),
]


@pytest.fixture(scope="module")
def reward(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD)
    return ["--reward", f"{path}:score"]


def fail(folder: Path, *how: str, code: int, options: list[str]) -> str:
    here = ["--run_dir", str(folder), "--resume", "auto", *options]
    return finish(start(*how, *OPTIONS, *here, program=("-c", FAILING)), code=code)


@pytest.mark.slow
def test_a_run_that_errors_end_goes_on_bit_for_bit(tmp_path: Path, reward: list[str]):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(*OPTIONS, *reward, "--run_dir", str(whole), "--steps", "0", "--eval.every", "0")
    shutil.copytree(whole, broken)  # both plan by one profile
    run(*OPTIONS, *reward, "--run_dir", str(whole), "--resume")
    before = 0
    for where, nth, error, code, step in ERRORS:
        printed = fail(broken, where, str(nth), error, code=code, options=reward)
        newest = max(int(path.name) for path in (broken / CHECKPOINTS).iterdir())
        assert newest >= before and (step is None or newest == step), printed
        assert (
            f"the policy after step {newest} is saved; go on with: python -m pat_jax.train"
            in printed
        )
        before = newest
    assert before < 7
    breaks = Path(reward[1].partition(":")[0]).with_name("breaks")
    breaks.touch()
    printed = fail(broken, "os:getcwd", "-1", "None", code=2, options=reward)
    assert "is saved; go on with" in printed and "importing" in printed
    breaks.unlink()
    breaks.with_name("broken").unlink()
    run(*OPTIONS, *reward, "--run_dir", str(broken), "--resume")

    expected, found = (
        without_times(read_metrics(folder / "metrics.jsonl")) for folder in (whole, broken)
    )
    for row, other in zip(expected, found, strict=True):
        assert other == row
    one, other = saved_run(whole), saved_run(broken)
    assert one[2] == other[2] == 7
    assert_same_bits(one[1], other[1])


@pytest.mark.slow
def test_responses_of_the_iteration_that_failed_are_not_drawn_again(tmp_path: Path, reward):
    """… and a second stop tells what there is."""
    folder = tmp_path / "run"
    options = [*(x for x in OPTIONS if x != "--deterministic"), *reward, "--run_dir", str(folder)]
    failing = ("pat_jax.run.learning:training_batch", "1", "RuntimeError")
    finish(start(*failing, *options, program=("-c", FAILING)), code=1)
    process = start(*options, "--resume", "--steps", "10000")
    printed, asked = "", False
    assert process.stdout is not None
    while not asked:
        printed += process.stdout.readline()
        asked = "step     2/10000" in printed
    assert "8 of 8 responses were on disk from before" in printed
    process.send_signal(signal.SIGTERM)
    while "stopping; once more" not in printed:
        printed += process.stdout.readline()
    process.send_signal(signal.SIGINT)
    last = finish(process, code=130).splitlines()[-1]
    words = shlex.join(["--resume", "--run_dir", str(folder), *reward])
    here = f"go on with: python -m pat_jax.train {words}"
    assert last == f"ended at once: the checkpoint of step 1 stays; {here}"


ENDLESS = [*TINY, "--warm_start.steps", "0", "--steps", "100000", "--checkpoint.every", "100000"]


def wait_for_steps(folder: Path, count: int) -> None:
    path, until = folder / "metrics.jsonl", time.monotonic() + 280
    while not path.exists() or len(read_metrics(path)) < count + 1:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path):
    folder = tmp_path / "run"
    here = ["--run_dir", str(folder)]
    process = start(*ENDLESS, *here)
    wait_for_steps(folder, 1)
    assert "another process is running there" in run(*here, "--resume", code=2)
    process.send_signal(signal.SIGTERM)
    output = finish(process, code=143)
    assert "Traceback" not in output
    assert f"--resume --run_dir {folder}" in output.splitlines()[-1]
    _, _, done = saved_run(folder)
    assert f"stopped by SIGTERM: the policy after step {done} is saved" in output
    assert done == read_metrics(folder / "metrics.jsonl")[-1]["step"]

    more = [*here, "--resume", "--steps", str(done + 1)]
    (folder / CONFIG_FILE).write_text((folder / CONFIG_FILE).read_text()[:300])
    output = run(*more, "--optimizer.learning_rate", "2e-6")
    assert f"resumed after step {done}" in output
    assert "resumed with other options: " in output and f"steps 100000 -> {done + 1}" in output
    assert re.search(r"optimizer\.learning_rate \S+ -> 2e-06", output)
    again = run(*here, "--resume", "--checkpoint.export_dir", str(tmp_path / "policy"))
    assert f"resumed after step {done + 1}" in again and "other options: checkpoint" in again
    assert (tmp_path / "policy" / "config.json").exists()

    damaged = folder / CHECKPOINTS / str(done + 1)
    (damaged / "state" / "manifest.ocdbt").write_bytes(b"")
    output = run(*here, "--resume")  # and the folder of the export is its own
    assert f"the checkpoint of step {done + 1} is damaged" in output
    assert f"resumed after step {done}" in output
    assert (folder / DAMAGED / str(done + 1)).is_dir()
    assert (folder / CHECKPOINTS / str(done + 1)).is_dir()


@pytest.mark.slow  # a process that compiles
def test_a_run_stopped_before_its_first_step_ends_at_once_and_begins_anew(tmp_path: Path):
    here = ["--run_dir", str(tmp_path / "run")]
    process = start(*ENDLESS, *here)
    assert process.stdout is not None
    while "run folder" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    output = finish(process, code=130)
    assert "stopped by SIGINT: no checkpoint is written yet" in output and "Traceback" not in output
    output = run(*here, "--resume", "--steps", "1")
    assert "no checkpoint to resume from: the run begins anew" in output
