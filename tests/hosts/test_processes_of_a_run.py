"""A training run of two processes: as of one, stopped by either, ended with either, gone on with."""

import pickle
import signal
import time
from pathlib import Path

import pytest
from drafted import rollouts
from fakes import static_run, subject
from runs import ROOT, TINY, run
from several import SMALL, ends, errors, start_all

from pat_jax.run.logging.metrics import read_metrics
from tests.lossless import CARRIES, tally
from tests.near_ties import Tally

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
SAME = ("reward/mean", "rollout/length_mean", "rollout/layouts", "rollout/switches", "eval/reward")
CLOSE = ("train/loss", "train/grad_norm", "train/cross_entropy")
SWITCHING = ["--layout", "dp2tp2@6,dp4tp1@2", "--rollout.burst_steps", "8"]
LONG = ["--steps", "1000", "--eval.every", "0"]


def metrics(folder: Path) -> list[dict]:
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_processes_learn_what_one_learns(tmp_path, deterministic):
    options = [*SMALL, *SWITCHING, "--seed", "3", "--warm_start.steps", "30"]
    options += ["--deterministic", "true"] * deterministic
    # Scored in shares; every group has some signal.
    reward = tmp_path / "reward.py"
    reward.write_text("def length(completions):\n    return [float(len(x)) for x in completions]\n")
    options += ["--reward", f"{reward}:length"]
    several, alone = tmp_path / "several", tmp_path / "alone"
    for code, output in ends(start_all(2, *options, "--run_dir", str(several))):
        assert code == 0, output
    run(*options, "--run_dir", str(alone))
    rows = list(zip(metrics(several), metrics(alone), strict=True))
    assert len(rows) == 3
    for ours, theirs in rows:
        for name in SAME:
            assert ours.get(name) == theirs.get(name), name
        for name in ours.keys() & set(CLOSE):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5, abs=1e-6), name
    rows = metrics(several)
    assert sum(row.get("rollout/switches", 0) for row in rows) > 0
    assert rows[-1]["train/grad_norm"] > 0


def started(folder: Path, *options: str) -> list:
    """Two processes in the middle of a run."""
    processes = start_all(2, *SMALL, *LONG, "--run_dir", str(folder), *options)
    wait_for(processes, lambda: len(metrics(folder)) > 2)
    return processes


def wait_for(processes, is_so) -> None:
    for _ in range(2800):
        time.sleep(0.1)
        try:
            if is_so():
                return
        except OSError:  # there is no file yet
            pass
        assert all(process.poll() is None for process in processes), ends(processes)
    raise AssertionError(ends(processes, timeout=1))


def test_a_signal_to_one_saves_and_the_same_command_goes_on(tmp_path):
    folder = tmp_path / "run"
    processes = started(folder, "--resume", "auto")
    processes[1].send_signal(signal.SIGTERM)
    found = ends(processes, timeout=60)
    assert [code for code, _ in found] == [143, 143], found
    assert "is saved; go on with" in found[0][1]
    done = metrics(folder)[-1]["step"]
    steps = ["--steps", str(done + 2)]
    command = [*SMALL, "--eval.every", "0", "--run_dir", str(folder), "--resume", "auto", *steps]
    (code, output), _ = ends(start_all(2, *command))
    assert code == 0 and f"resumed after step {done}" in output, output
    assert metrics(folder)[-1]["step"] == done + 2
    # And in one process.
    more = run(*command[:-1], str(done + 3))
    assert f"resumed after step {done + 2}" in more


@pytest.mark.parametrize(("gone", "how"), [(0, signal.SIGSTOP), (1, signal.SIGKILL)])
def test_where_one_dies_or_hangs_the_other_ends_with_a_sentence(tmp_path, gone, how):
    folder = tmp_path / "run"
    processes = started(folder)
    processes[gone].send_signal(how)
    try:
        code, output = ends([processes[1 - gone]], timeout=60)[0]
    finally:
        processes[gone].kill()
        ends([processes[gone]])
    assert code == 1, output
    (sentence,) = errors(output)
    assert f"process {gone} on " in sentence and "--resume auto" in sentence


# The main thread of one process comes to nothing more in the second iteration, before others need it.
HANGS = """
import threading
import jax
from pat_jax import train
from pat_jax.common.run_command import run_command
from pat_jax.run import {module}

def hanging(*arguments, do={module}.{function}, calls=[], **named):
    calls.append(1)
    if jax.process_index() == {index} and len(calls) == 2:
        threading.Event().wait()
    return do(*arguments, **named)

{module}.{function} = hanging
run_command(train.main)
"""


# The others wait for its share of the rewards, or on their devices for its part of the update.
@pytest.mark.parametrize(
    ("gone", "module", "function"),
    [(1, "collect", "wait_for_rewards"), (0, "learning", "training_batch")],
)
def test_where_the_main_thread_of_one_hangs_both_end_with_a_sentence(
    tmp_path, gone, module, function
):
    options = [*SMALL, *LONG, "--distributed.patience", "15", "--run_dir", str(tmp_path / "run")]
    program = "-c", HANGS.format(module=module, function=function, index=gone)
    found = ends(start_all(2, *options, program=program))
    assert len(metrics(tmp_path / "run")) == 1
    for code, output in found:
        assert code == 1 and "Traceback" not in output, output
        (sentence,) = errors(output)
        assert f"error: process {gone} on " in sentence and "for 15 s, last at " in sentence
        assert f"in pat_jax.run.{module}:" in sentence and "--resume auto" in sentence


def test_where_one_of_four_dies_all_others_end_and_the_same_command_goes_on(tmp_path):
    folder, gone = tmp_path / "run", 0
    each = [*SMALL, "--eval.every", "0", "--run_dir", str(folder), "--resume", "auto"]
    processes = start_all(4, *each, "--steps", "1000", "--checkpoint.every", "1")
    wait_for(processes, lambda: len(metrics(folder)) > 2)
    processes[gone].kill()
    found = ends(processes, timeout=60)
    assert found.pop(gone)[0] == -signal.SIGKILL
    for code, output in found:
        assert code == 1, output
        assert f"process {gone} on " in errors(output)[0] and "Traceback" not in output
    saved = max(
        int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()
    )
    found = ends(start_all(4, *each, "--steps", str(saved + 2)))
    assert [code for code, _ in found] == [0] * 4, found
    assert f"resumed after step {saved}" in found[0][1]
    assert metrics(folder)[-1]["step"] == saved + 2


def test_processes_that_are_started_with_other_options_do_not_begin(tmp_path):
    each = [["--seed", "1"], ["--seed", "2"]]
    options = *TINY, "--devices", "2", "--run_dir", str(tmp_path / "run")
    for code, output in ends(start_all(2, *options, each=each), timeout=100):
        assert code == 2 and "(--seed 2, not 1)" in output, output
    assert not (tmp_path / "run").exists()


WORKER = (str(ROOT / "tests" / "hosts" / "generating_worker.py"),)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count, name", [(2, "kv8"), (4, "kv2")])
def test_several_processes_say_what_one_says(tmp_path, count, name):
    """And compile nothing after the warm-up; each burst's decisions are compared on the way."""
    out = tmp_path / "said"
    processes = start_all(count, "--what", name, "--out", str(out), program=WORKER)
    for code, output in ends(processes, timeout=800):
        assert code == 0, output
    generated, compiled = pickle.loads(out.read_bytes())
    assert compiled == 0
    requests, static = static_run(name, seed=0)
    for (path, carry), (completions, ways) in generated.items():
        assert len(ways) == len(path) - 1 and carry in (*ways, *CARRIES[1:2])
        found = sum(tally(subject(name), requests, static, [completions]).values(), Tally())
        assert found.compared > 0.9 * found.tokens > 100
        assert found.unexplained == found.judge_disagrees == 0
        assert found.max_logprob_difference <= 1e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_draft_and_move_as_one_does(tmp_path):
    """Copied drafts, of earlier responses as well, by samples that begin one after the other; drafts of a
    model; and requests that go to emptier replicas. Each burst, and what its rows draft from, is compared on
    the way."""
    out = tmp_path / "said"
    for code, output in ends(
        start_all(2, "--what", "drafts", "--out", str(out), program=WORKER), timeout=800
    ):
        assert code == 0, output
    generated, expected = pickle.loads(out.read_bytes()), rollouts()
    assert generated == expected
    copied, model = expected["texts"], expected["a draft model"]
    assert min(accepted for _, accepted, _ in copied["by source"]) > 0
    assert model["accepted"] > 0 and model["drafted"] > model["accepted"]
    assert copied["layouts"] == model["layouts"] == ["dp4tp1", "dp2tp2"]
    assert expected["nobody"]["moved"]
