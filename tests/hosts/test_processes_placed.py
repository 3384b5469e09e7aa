"""Runs of two processes, each of which is cut alike: the same tokens, and the same parameters."""

import pickle
import random
import time
from pathlib import Path

import pytest
from placed_runs import differences, ended, waited
from runs import JUDGE, ROOT, TINY, presets_of_one_layer, run, write_checkpoint
from several import ends, errors, start_all

from pat_jax.run.logging.metrics import read_metrics

WORKER = (str(ROOT / "tests" / "hosts" / "placed_worker.py"),)
SEPARATE = "--placement separate"
RUNS = {
    "groups": "--devices 4 --layout dp4tp1 --fsdp_size 2",
    "interleave": "--devices 4 --layout dp4tp1 --placement interleave",
    "separate": f"--devices 4 --layout dp2tp1 {SEPARATE}",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_learn_what_one_learns_in_every_placement(tmp_path: Path):
    judge = write_checkpoint(tmp_path / "judge", JUDGE)
    lines = "\n".join(f"{name}:{options}" for name, options in RUNS.items())
    options = "--runs", lines, "--judge", str(judge), "--out", str(tmp_path)
    for code, output in ends(start_all(2, *options, program=WORKER), timeout=800):
        assert code == 0, output
    with presets_of_one_layer("tiny"):
        flat = ended(tmp_path / "flatten", judge, "--layout", "dp2tp1", "--devices", "2")
    for name in RUNS:
        other = pickle.loads((tmp_path / f"{name}.pickle").read_bytes())
        assert differences(other, flat) == [] and other.compiled == [], name
        assert waited(other.rows) == [[]] * len(flat.rows) != [], name
        devices = [1] if SEPARATE in RUNS[name] else [0, 1]
        assert set(map(tuple, other.devices.values())) == {tuple(devices)}, name


pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
# The policy learns from the first iteration on; a critic that begins as the policy.
PPO = """
    --devices 4 --algorithm ppo --algorithm.beta 0.05 --critic.learning_rate 1e-3 --eval.every 0
    --optimizer.learning_rate 1e-3 --deterministic true --checkpoint.every 1 --layout dp4tp1
"""
KILLS = 2


def test_four_processes_learn_what_one_learns(tmp_path: Path):
    judge = write_checkpoint(tmp_path / "judge", JUDGE)
    lines = "split:--devices 8 --layout dp8tp1 --placement split"
    options = "--runs", lines, "--judge", str(judge), "--out", str(tmp_path), "--devices", "8"
    for code, output in ends(start_all(4, *options, program=WORKER), timeout=800):
        assert code == 0, output
    with presets_of_one_layer("tiny"):
        flat = ended(tmp_path / "flatten", judge, "--layout", "dp4tp1", "--devices", "4")
    other = pickle.loads((tmp_path / "split.pickle").read_bytes())
    assert differences(other, flat) == [] and other.compiled == []
    assert other.devices == {"train": [0, 1], "critic": []}  # of process 0


def exported(folder: Path) -> list[str]:
    """The options with which a run writes what its models have learned."""
    into = "--checkpoint.export_dir", str(folder / "policy"), "--critic.export_dir"
    return [*into, str(folder / "critic"), "--run_dir", str(folder / "run")]


def learned(folder: Path) -> list[bytes]:
    return [(folder / name / "model.safetensors").read_bytes() for name in ("policy", "critic")]


def test_killed_runs_go_on_bit_for_bit_also_in_one_process(tmp_path: Path):
    split = [*TINY, *PPO.split(), "--placement", "split", "--resume", "auto", "--steps", "4"]
    through, killed, chosen = tmp_path / "through", tmp_path / "killed", random.Random(0)
    for folder in (through, killed):
        folder.mkdir()
    for code, output in ends(start_all(4, *split, *exported(through))):
        assert code == 0, output
    for done in range(KILLS):
        processes = start_all(4, *split, *exported(killed))
        metrics = killed / "run" / "metrics.jsonl"
        while not metrics.exists() or len(read_metrics(metrics)) <= done:
            assert all(process.poll() is None for process in processes), ends(processes)
            time.sleep(0.05)
        time.sleep(chosen.uniform(0, 0.5))
        processes[chosen.randrange(4)].kill()
        ends(processes, timeout=60)
    for code, output in ends(start_all(4, *split, *exported(killed))):
        assert code == 0, output
    assert learned(killed) == learned(through)
    other = [*split[:-1], "5", "--devices", "2", "--layout", "auto", "--placement", "flatten"]
    other += ["--deterministic", "false"]
    assert "resumed after step 4" in run(*other, "--run_dir", str(killed / "run"))


# The critic's owner comes to this for the second time, when others update the policy.
FAILS = """
import jax
from pat_jax import train
from pat_jax.common.run_command import run_command
from pat_jax.training.trainer import Trainer

def failing(self, *given, do=Trainer.update, calls=[]):
    calls.extend([1] * (self.name == "critic"))
    if jax.process_index() == 3 and len(calls) == 2:
        raise OSError("no device")
    return do(self, *given)

Trainer.update = failing
run_command(train.main)
"""


def test_where_an_owner_of_the_critic_fails_all_end_with_a_sentence(tmp_path: Path):
    options = [*TINY, *PPO.split(), "--placement", "split", "--steps", "1000"]
    options += ["--run_dir", str(tmp_path / "run")]
    found = ends(start_all(4, *options, program=("-c", FAILS)))
    code, output = found.pop(3)
    assert code == 1 and errors(output) == ["error: OSError: no device"], output
    for code, output in found:
        (sentence,) = errors(output)
        assert code == 1 and "Traceback" not in output, output
        assert sentence.startswith("error: process 3 ") and sentence.endswith("OSError: no device")
