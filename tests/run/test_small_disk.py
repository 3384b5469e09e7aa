"""A disk that is full for a while, or takes nothing new, costs a run a checkpoint and never the run.

In a mount namespace of its own, where this user may mount: the file system is real.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import COMMAND, ROOT, TINY

from pat_jax.run.logging.metrics import read_metrics

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
