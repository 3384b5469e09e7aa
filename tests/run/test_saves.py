"""Where checkpoints cannot be written a run says so, tries again, and goes on."""

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import pytest
from runs import COMMAND, ROOT, TINY

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.config.run import RunConfig
from pat_jax.run.checkpoints import schedule as saves
from pat_jax.run.checkpoints.checkpoint import Checkpointer, SaveError
from pat_jax.run.checkpoints.schedule import Saves
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.logging.progress import Progress
from pat_jax.run.process import open_run as open_run_module
from pat_jax.run.process.open_run import OpenRun, WholeStep
from pat_jax.run.process.stop_signals import Stopped, StopSignals


class FullDisk:
    """Writes in the background, as `Checkpointer`; `outcomes` says of each attempt if it succeeds."""

    def __init__(self, outcomes: Sequence[bool]):
        self.outcomes, self.saved, self.pending = list(outcomes), list[int](), list[int]()

    def save(self, step: int, state: Any, meta: Any) -> None:
        self.wait()
        if self.saved[-1:] != [step]:
            self.pending.append(step)

    def latest_step(self) -> int | None:
        return next(reversed([*self.saved, *self.pending]), None)

    def newest_on_disk(self) -> int | None:
        return next(reversed(self.saved), None)

    def close(self) -> None:
        """As `Checkpointer`: whatever becomes of what is being written."""
        self.pending.clear()

    def wait(self) -> None:
        for step in [self.pending.pop()] if self.pending else []:
            if not self.outcomes.pop(0):
                raise SaveError(f"the checkpoint of step {step} was not written")
            self.saved.append(step)

    check = wait  # what has begun is over when it is looked at


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saves, "PAUSES_S", (0.0, 0.0, 0.0))


def train(disk: FullDisk, steps: int, every: int) -> list[str]:
    output: list[str] = []
    kept = Saves(cast(Checkpointer, disk), every, steps, output.append)
    for step in range(1, steps + 1):
        if kept.is_due(step):
            kept.save(step, {}, {})
    kept.end(steps, {}, {})
    return output


def test_a_failed_one_is_said_at_once_and_the_next_step_is_saved():
    disk = FullDisk([True, False, False, *[True] * 9])
    output = train(disk, steps=12, every=4)
    lines = [line.split(";")[0] for line in output]
    assert lines == [f"the checkpoint of step {step} was not written" for step in (8, 9)]
    assert disk.saved == [4, 10, 12]


def test_the_last_one_is_tried_several_times():
    disk = FullDisk([False, False, True, True])
    output = train(disk, steps=2, every=2)
    assert disk.saved == [2] and len(output) == 2 and "again in 0 s" in output[-1]


def test_a_run_that_could_not_save_its_last_step_does_not_end_well():
    disk = FullDisk([False] * 9)
    with pytest.raises(UserError, match=r"step 2 was not written; make room, then .*--resume"):
        train(disk, steps=2, every=2)


def open_run(disk: FullDisk) -> Any:
    run: Any = OpenRun.__new__(OpenRun)
    run.folder, run.progress, run.checkpoints = Path("run"), Progress(9), disk
    run.saves = Saves(cast(Checkpointer, disk), 2, 9, run.progress.print)
    run._config = RunConfig()
    run._command, run._config_text, run.whole = "train", "", None
    return run


def stop(number: signal.Signals, disk: FullDisk, steps_done: int | None) -> None:
    """As a run that is stopped."""
    run = open_run(disk)
    run.whole = None if steps_done is None else WholeStep(steps_done, {}, {})
    with pytest.raises(Stopped), run.kept_at_a_stop():
        raise Stopped(number)


def test_a_stopped_run_waits_for_the_checkpoint_that_is_being_written(capsys):
    disk = FullDisk([False, True])
    disk.save(4, {}, {})
    stop(signal.SIGTERM, disk, 4)
    assert disk.saved == [4]
    assert "the policy after step 4 is saved; go on with" in capsys.readouterr().err


def test_a_stopped_run_that_cannot_be_saved_says_so(capsys):
    stop(signal.SIGTERM, FullDisk([False] * 9), 4)
    output = capsys.readouterr().err.splitlines()[-1]
    assert "step 4 was not written; make room" in output and "is saved" not in output
    assert output.count("; go on with: ") == 1 and ".;" not in output


# --- errors ------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def fail(
    disk: FullDisk, error: BaseException, state: Any = None, signals: StopSignals | None = None
) -> None:
    """As a run that has done four steps."""
    signals = signals or StopSignals()
    run = open_run(disk)
    run.whole = WholeStep(4, {"train": state}, {})
    with pytest.raises(type(error)) as raised, run.saved_at_an_error(signals, lambda: None):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("error", [Broken(), UserError("no reward"), KeyboardInterrupt()], ids=repr)
def test_whatever_error_ends_a_run_its_last_step_is_saved_first(capsys, error):
    disk = FullDisk([True])
    fail(disk, error)
    assert disk.saved == [4]
    output = "the policy after step 4 is saved; go on with: python -m pat_jax.train --resume"
    assert capsys.readouterr().err.splitlines()[-1] == f"{output} --run_dir run"


def test_an_error_is_what_is_raised_though_nothing_can_be_saved(capsys):
    fail(FullDisk([False] * 9), Broken())
    assert "step 4 was not written; make room" in capsys.readouterr().err.splitlines()[-1]

    class Dead(FullDisk):
        def save(self, step: int, state: Any, meta: Any) -> None:
            raise RuntimeError("the device is gone\nat some place")

    disk = Dead([])
    disk.saved = [2]
    fail(disk, Broken())
    output = "the last whole step was not saved (the device is gone), and the checkpoint of step 2"
    assert output in capsys.readouterr().err.splitlines()[-1]


def test_a_state_that_went_into_a_failed_update_is_said_to_be_gone(capsys):
    state = {"weights": jnp.ones(3), "moments": jnp.ones(3)}
    state["moments"].delete()
    disk = FullDisk([True])
    disk.saved = [2]
    fail(disk, Broken(), state)
    assert disk.saved == [2]
    output = (
        "step 4 went into an update that failed, and the checkpoint of step 2 stays; go on with"
    )
    assert output in capsys.readouterr().err.splitlines()[-1]


def test_a_signal_does_not_interrupt_the_saving(capfd):
    class Interrupted(FullDisk):
        def save(self, step: int, state: Any, meta: Any) -> None:
            signal.raise_signal(signal.SIGTERM)
            super().save(step, state, meta)

    disk = Interrupted([True])
    with StopSignals() as signals:
        fail(disk, Broken(), signals=signals)
    assert disk.saved == [4] and "SIGTERM: stopping; once more" in capfd.readouterr().err


def test_one_of_several_processes_does_not_save_alone(capsys, monkeypatch):
    """The others are elsewhere, and would never come."""
    monkeypatch.setattr(open_run_module, "process_group", lambda: ProcessGroup(1, 2))
    disk = FullDisk([])
    disk.saved = [2]
    fail(disk, Broken())
    assert disk.saved == [2]
    output = "the checkpoint of step 2 stays; start all processes again with --resume auto."
    assert capsys.readouterr().err.splitlines()[-1] == output


def test_a_run_whose_output_nobody_reads_is_saved_all_the_same(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    disk = FullDisk([True])
    fail(disk, Broken())
    assert disk.saved == [4]


STEPS = 40
# Fills the disk, or takes the right to write, after two steps, and gives it back when the run has said so.
DRIVER = """
import json, shutil, subprocess, sys, time
from pathlib import Path

kind, disk, said, *command = sys.argv[1:]
disk, said = Path(disk), Path(said)
def call(*words):
    subprocess.run([str(word) for word in words], check=True)
call("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk)
run = disk / "run"
with said.open("w") as output:
    process = subprocess.Popen([*command, "--run_dir", str(run)], stdout=output, stderr=output)

def wait_for(is_so):
    while not is_so():
        assert process.poll() is None, said.read_text()
        time.sleep(0.02)

metrics = run / "metrics.jsonl"
wait_for(lambda: metrics.exists() and metrics.read_text().count("train/loss") >= 2)
if kind == "full":
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
else:
    call("mount", "--bind", run, run)
    call("mount", "-o", "remount,bind,ro", run)
wait_for(lambda: said.read_text().count("was not written") >= 2)
if kind == "full":
    (disk / "ballast").unlink()
else:
    call("umount", "-l", run)
code = process.wait(timeout=240)
shutil.copytree(run, said.with_name("kept"))
print(code)
"""


def can_mount() -> bool:
    if not shutil.which("unshare"):
        return False
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="this user may not mount a file system")
@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_run_goes_on_and_saves_when_it_can(tmp_path: Path, kind: str):
    disk, printed = tmp_path / "disk", tmp_path / "said"
    disk.mkdir()
    options = [*TINY, "--steps", str(STEPS), "--checkpoint.every", "1"]
    command = [kind, str(disk), str(printed), sys.executable, *COMMAND, *options]
    driver = ["unshare", "-rm", sys.executable, "-c", DRIVER, *command]
    done = subprocess.run(driver, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), (done.stderr, printed.read_text())

    kept, output = tmp_path / "kept", printed.read_text()
    # Where the disk fills up in the middle of a save, Orbax's writers print what they raised.
    assert not re.search(r'File ".*/pat_jax/', output), output
    assert "training goes on, and the next step is saved" in output
    rows = read_metrics(kept / "metrics.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, STEPS + 1))
    assert str(STEPS) in {path.name for path in (kept / "checkpoints").iterdir()}
    for name in ("rollout.json", "rollout.svg", "config.yaml", "run.log"):
        assert (kept / name).exists()
    assert json.loads((kept / "rollout.json").read_text())["layout"]
