"""A run that is told to stop keeps what it has done; its folder belongs to one process at a time."""

import re
import signal
import time
from pathlib import Path

import pytest
from runs import TINY, finish, run, saved_run, start

from pat_jax.run.checkpoints.checkpoint import DAMAGED
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.process.folder import CHECKPOINTS, CONFIG_FILE

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
    assert "stopped by SIGINT: nothing was done yet" in output and "Traceback" not in output
    output = run(*here, "--resume", "--steps", "1")
    assert "no checkpoint to resume from: the run begins anew" in output
