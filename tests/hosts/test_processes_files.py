"""What several processes read and write together: rows, checkpoints, experts of models."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from runs import ROOT, SMALL_ROLLOUT, write_checkpoint
from safetensors.numpy import load_file
from several import ends, errors, start_all

from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_files import WEIGHTS_FILE
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.run.checkpoints.files import MANIFEST
from pat_jax.run.files.folder import CONFIG_FILE, ROWS
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.roles.role_params import FOLDER

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
PROGRAM = """
import sys
from dataclasses import dataclass
import pat_jax
from pat_jax.rl.algorithm.policy_loss import PolicyLoss

@dataclass(frozen=True)
class Mine(PolicyLoss):
    is_on_policy: bool = True

count, *words = sys.argv[1:]
options = dict(zip([word[2:] for word in words[::2]], words[1::2]))
rows = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(60)]
more = int(count) * int(options["distributed.process_id"])
try:
    pat_jax.train(options, data=rows + rows[:more], eval={"data": rows[:9]}, loss=Mine())
except pat_jax.UserError as error:
    sys.exit(f"error: {error}")
"""


def train(folder: Path, more: int) -> list[tuple[int, str]]:
    if not (folder / "model").exists():
        write_checkpoint(folder / "model")
    options = [*SMALL_ROLLOUT, "--warm_start.steps", "0", "--rollout.max_prompt_length", "120"]
    options += ["--steps", "1", "--devices", "4", "--layout", "dp4tp1"]
    options += ["--model", str(folder / "model"), "--run_dir", str(folder / "run")]
    return ends(start_all(2, str(more), *options, program=("-c", PROGRAM)))


def test_two_processes_read_one_file(tmp_path: Path):
    found = train(tmp_path, 3)
    assert [code for code, _ in found] == [1, 1], found
    assert "started with other options than process 0 (--data.files" in found[0][1]
    assert len(errors(found[0][1])) == 1 and not (tmp_path / "run").exists()
    for code, generated in train(tmp_path, 0):
        assert code == 0, generated
    assert ".loss:Mine" in (tmp_path / "run" / CONFIG_FILE).read_text()
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 1
    rows, heldout = sorted((tmp_path / "run" / ROWS).glob("*/*.jsonl"), key=lambda path: path.name)
    counts = [
        len([json.loads(x) for x in path.read_text().splitlines()]) for path in (rows, heldout)
    ]
    assert counts == [60, 9]


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


def test_two_processes_read_their_own_experts_and_export_them_all(tmp_path: Path):
    policy = Policy.from_config(preset("tiny-moe"))
    export(tmp_path / "source", policy, policy.init(3), jnp.float32)
    options = ["--source", str(tmp_path / "source"), "--out", str(tmp_path / "out")]
    worker = (str(ROOT / "tests" / "hosts" / "loading_worker.py"),)
    found = ends(start_all(2, *options, program=worker))
    assert [code for code, _ in found] == [0, 0], found

    stored = load_file(tmp_path / "source" / WEIGHTS_FILE)
    for i, own in enumerate((range(4), range(4, 8))):
        others = {name for name in stored if ".experts." not in name}
        experts = {
            f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
            for layer in (0, 2)
            for expert in own
            for part in ("gate", "up", "down")
        }
        assert set(json.loads((tmp_path / f"opened-{i}.json").read_text())) == others | experts
    written = load_file(tmp_path / "out" / WEIGHTS_FILE)
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(written[name], tensor)
