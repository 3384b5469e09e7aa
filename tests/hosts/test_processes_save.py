"""A checkpoint that one process of several cannot write: all go on and try again, or all end and say why."""

from pathlib import Path

import pytest
from runs import ROOT
from several import ends, errors, start_all

from pat_jax.run.checkpoints.files import MANIFEST
from pat_jax.run.roles.role_params import FOLDER

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
WORKER = (str(ROOT / "tests" / "hosts" / "saving_worker.py"),)


def save(directory: Path, fault: str = "", at: str = "", *more: str) -> list[tuple[int, str]]:
    options = ["--directory", str(directory), "--fault", fault, "--at", at, *more]
    return ends(start_all(2, *options, "--distributed.patience", "60", program=WORKER), timeout=120)


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    "fault, at",
    [("asked", "0,1"), ("written", "0"), ("written", "1"), ("written, and waited for", "1")],
)
def test_what_all_find_out_is_said_once_and_the_next_step_is_saved(tmp_path, fault, at):
    found = save(tmp_path, fault, at)
    assert [code for code, _ in found] == [0, 0], found
    generated = [line for line in found[0][1].splitlines() if "training goes on" in line]
    assert len(generated) == 1 and f"a mistake where it is {fault})" in generated[0], found[0][1]
    assert "0" in at.split(",") or "(process 1 on " in generated[0]
    assert {"1", "3", "4"} <= {*saved(tmp_path)} <= {"1", "2", "3", "4"}


@pytest.mark.parametrize(
    "fault, at", [("asked", "1"), ("beginning", "0"), ("beginning", "1"), ("begun", "1")]
)
def test_what_others_would_wait_for_on_their_devices_ends_all(tmp_path, fault, at):
    for code, output in save(tmp_path, fault, at):
        (sentence,) = errors(output)
        assert code == 1 and f"process {at} on " in sentence and "--resume auto" in sentence, output
        why = f"could not begin the checkpoint of step 2 (a mistake where it is {fault})"
        assert why in sentence and "step 3" not in output, output
    # And the same command goes on.
    found = save(tmp_path)
    assert [code for code, _ in found] == [0, 0], found
    assert saved(tmp_path) == ["1", "2", "3", "4"]


def test_one_without_checksums_all_step_over(tmp_path):
    assert [code for code, _ in save(tmp_path)] == [0, 0]
    (tmp_path / "4" / MANIFEST).unlink()
    found = save(tmp_path, "", "", "--restores", "true")
    assert [code for code, _ in found] == [0, 0], found
    assert f"restored 3 84 the checkpoint of step 4 is damaged: it has no {MANIFEST}" in found[0][1]
    assert saved(tmp_path) == ["1", "2", "3"]


def test_the_reference_is_saved_and_read_together_or_refused_by_all(tmp_path):
    options = "", "", "--reference", "true"
    restoring = *options, "--restores", "true"
    assert [code for code, _ in save(tmp_path, *options)] == [0, 0]
    found = save(tmp_path, *restoring)
    assert [code for code, _ in found] == [0, 0] and "read 28" in found[0][1], found
    (tmp_path / FOLDER / MANIFEST).unlink()
    found = save(tmp_path, *restoring)
    (sentence,) = errors(found[0][1])
    assert f"the reference policy in {tmp_path}/{FOLDER} is damaged" in sentence
    assert len({code for code, _ in found}) == 1 and found[0][0] > 0, found
