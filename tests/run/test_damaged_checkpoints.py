"""A newest checkpoint that is damaged in any way is stepped over, and said to be; a failed save is
noticed, tried again, and takes nothing with it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pat_jax.common.errors import UserError
from pat_jax.run.checkpoints import orbax_io as checkpoint_orbax
from pat_jax.run.checkpoints.checkpoint import DAMAGED, Checkpointer, SaveError
from pat_jax.run.checkpoints.files import MANIFEST, seal
from pat_jax.run.checkpoints.files import damage as damage_of
from pat_jax.run.checkpoints.meta import check_fingerprint

STATE = {"x": jnp.arange(3000.0), "y": jnp.ones(7)}
ABSTRACT = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE
)
MODEL = {"embed": 16}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


Damage = Callable[[Path], None]
DAMAGES = [cut, empty, Path.unlink, replace_by_a_folder]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpointer(folder, fingerprint=MODEL) as checkpoints:
        checkpoints.save(10, STATE, {"at": 10})
        checkpoints.save(20, jax.tree.map(lambda x: x + 1, STATE), {"at": 20})
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


@pytest.fixture
def checkpoints(folder: Path) -> Iterator[Checkpointer]:
    with Checkpointer(folder, fingerprint=MODEL) as opened:
        yield opened


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def test_any_damaged_file_of_the_newest_is_found(saved: Path, tmp_path: Path):
    cases = [(file, flip) for file in files_of(saved / "20")]
    cases += [(files_of(saved / "20" / "state")[-1], damage) for damage in DAMAGES]
    for number, (file, damage) in enumerate(cases):
        folder = Path(shutil.copytree(saved, tmp_path / str(number) / "checkpoints"))
        damage(folder / file.relative_to(saved))
        check_fingerprint(folder, MODEL)
        with Checkpointer(folder, fingerprint=MODEL) as checkpoints:
            step, state, meta = checkpoints.restore(ABSTRACT)
            assert (step, meta, state["x"][5]) == (10, {"at": 10}, 5.0), file
            (line,) = checkpoints.stepped_over
            assert "checkpoint of step 20 is damaged: " in line and line.count(". ") == 0
            words = (
                f"{file.relative_to(saved / '20')} has another checksum than when it was written"
            )
            assert damage != flip or file.name == MANIFEST or words in line
            checkpoints.save(20, STATE, {})  # its place is free
        assert (folder.with_name(DAMAGED) / "20").is_dir()  # nothing saved is lost


def without(name: str) -> Damage:
    """A list of checksums that lacks a file."""

    def damage(path: Path) -> None:
        entries = json.loads(path.read_text())
        del entries[name]
        path.write_text(json.dumps(entries))

    return damage


def written(text: str) -> Damage:
    def damage(path: Path) -> None:
        path.write_text(text)

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "it has no pat_jax_files.json, so that nobody can tell"),
        (written('{"meta/metadata": [1, 2]}'), "has no checksum in pat_jax_files.json"),
        (without("state/manifest.ocdbt"), "state/manifest.ocdbt has no checksum"),
        (written('{"a": [1e999, 2]}'), "pat_jax_files.json cannot be read"),
    ],
)
def test_without_the_checksums_of_all_files_none_is_trusted(folder, damage, words):
    damage(folder / "20" / MANIFEST)
    check_fingerprint(folder, MODEL)
    with Checkpointer(folder, fingerprint=MODEL) as checkpoints:
        assert checkpoints.restore(ABSTRACT)[0] == 10
    (line,) = checkpoints.stepped_over
    assert words in line and line.endswith(f"moved to {folder.with_name(DAMAGED)}/20.")
    assert (folder.with_name(DAMAGED) / "20" / "state").is_dir()  # nothing saved is lost


def test_a_file_of_the_system_is_no_damage(folder: Path):
    (folder / "20" / ".DS_Store").write_text("?")
    (folder / "20" / "state" / ".nfs0001").write_text("?")
    with Checkpointer(folder, fingerprint=MODEL) as checkpoints:
        assert checkpoints.restore(ABSTRACT)[0] == 20


def test_a_checkpoint_is_not_there_before_its_checksums_are(folder, checkpoints, monkeypatch):
    """So that a kill leaves none without."""
    seen = []

    def look(path: Path) -> None:
        seen.append(((folder / "30").exists(), path.parent))
        seal(path)

    monkeypatch.setattr(checkpoint_orbax, "seal", look)
    checkpoints.save(30, STATE, {})
    checkpoints.wait()
    assert seen == [(False, folder)] and damage_of(folder / "30") is None
    assert sorted(path.name for path in folder.iterdir()) == ["20", "30"]


@pytest.mark.parametrize(
    ("name", "is_file"),
    [("30", True), ("30", False), ("latest", True), ("20 (copy)", False), ("９", True)],
)
def test_what_is_no_checkpoint_is_moved_aside(folder: Path, name: str, is_file: bool):
    stray = folder / name
    stray.write_text("?") if is_file else stray.mkdir()
    check_fingerprint(folder, MODEL)
    with Checkpointer(folder, fingerprint=MODEL) as checkpoints:
        assert checkpoints.restore(ABSTRACT)[0] == 20
        assert len(checkpoints.stepped_over) == 1
        checkpoints.save(30, STATE, {})
    assert ((folder.with_name(DAMAGED) / name).exists() and not stray.exists()) or name == "30"


def test_where_all_are_damaged_a_sentence_says_where_they_are(folder, checkpoints):
    for step in ("10", "20"):
        empty(folder / step / "state" / "manifest.ocdbt")
    with pytest.raises(UserError, match=rf"no checkpoint to resume from in .*{DAMAGED}"):
        checkpoints.restore(ABSTRACT)


FULL = """
import logging, resource, signal, sys
import jax, jax.numpy as jnp
from pat_jax.run.checkpoints.checkpoint import Checkpointer, SaveError

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logging.getLogger("pat_jax").addHandler(logging.NullHandler())  # as run.log would be
state = {str(i): jax.random.normal(jax.random.key(i), (20_000,)) for i in range(40)}
checkpoints = Checkpointer(sys.argv[1])
checkpoints.save(1, state, {})
checkpoints.wait()
limit(50_000)  # to each file, as a full disk would
checkpoints.save(10, state, {})
while not checkpoints._pending[1].done():
    pass
try:
    checkpoints.check()
except SaveError as error:
    print(error)
try:
    checkpoints.save(11, state, {})
    checkpoints.wait()
except SaveError as error:
    print(error)
limit(resource.RLIM_INFINITY)
checkpoints.save(12, state, {})
checkpoints.wait()
print(checkpoints.latest_step())
checkpoints.close()
"""


def test_a_failed_save_is_one_sentence_and_the_next_one_succeeds(tmp_path: Path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", FULL, str(tmp_path / "checkpoints")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second, newest = done.stdout.splitlines()
    for line, step in ((first, 10), (second, 11)):
        assert line.startswith(f"the checkpoint of step {step} was not written to ")
        assert "File too large" in line and line.endswith("the one of step 1 stays")
    assert newest == "12" and len(done.stderr.splitlines()) < 10, done.stderr
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "12"]


@pytest.mark.parametrize(
    "other",
    [
        {"x": ABSTRACT["x"], "y": {"a": ABSTRACT["y"]}},
        {"x": ABSTRACT["x"], "y": [ABSTRACT["y"], ABSTRACT["y"]]},
        ABSTRACT | {"z": ABSTRACT["y"]},
    ],
)
def test_a_state_of_another_form_is_one_sentence(checkpoints: Checkpointer, other: object):
    with pytest.raises(UserError, match=r"the checkpoint .*/20 cannot be read") as error:
        checkpoints.restore(other)
    assert "\n" not in str(error.value) and "options" in str(error.value)


@pytest.mark.parametrize("content", ["[]", "{}", '{"fingerprint": 1, "meta": 2}', "[" * 9999, "x"])
def test_metadata_of_another_form_are_one_sentence(folder: Path, content: str):
    (folder / "20" / "meta" / "metadata").write_text(content)
    seal(folder / "20")  # as another version would
    with (
        Checkpointer(folder, fingerprint=MODEL) as checkpoints,
        pytest.raises(UserError, match=r"20/meta/metadata is not as this version writes it"),
    ):
        checkpoints.restore(ABSTRACT)
    assert (folder / "20").is_dir()


def test_who_is_interrupted_while_waiting_has_the_checkpoint_pending_still(
    folder: Path, checkpoints: Checkpointer, monkeypatch: pytest.MonkeyPatch
):
    class Stop(BaseException): ...

    def stop(*_: object) -> None:
        raise Stop

    may_end = threading.Event()
    monkeypatch.setattr(checkpoint_orbax, "seal", lambda path: (may_end.wait(60), seal(path)))
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        checkpoints.save(30, STATE, {})
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Stop):
            checkpoints.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
        may_end.set()
    checkpoints.save(30, STATE, {})  # does nothing but wait for it
    assert (folder / "30" / MANIFEST).exists()


def test_a_disk_without_room_is_seen_before_anything_is_written(folder, checkpoints, monkeypatch):
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000))
    before = files_of(folder)
    with pytest.raises(SaveError, match=r"step 30 .* of which 0\.0 are free\): .* 20 stays"):
        checkpoints.save(30, STATE, {})
    assert files_of(folder) == before
    # Zeros and the like take less.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=9_000))
    checkpoints.save(30, STATE, {})
    assert checkpoints.latest_step() == 30
