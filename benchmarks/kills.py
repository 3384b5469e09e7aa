"""Kills a run at random moments of every stage, and sees whether it comes to what an unkilled one does.

    python -m benchmarks.kills --kills 200 --out benchmarks/results/kills.json

Each process of the run is told in which stage to die: a thread of it looks every half millisecond which
functions are under way, and sends itself SIGKILL up to some milliseconds after a function of that stage
has begun, in a random one of the first iterations. The next process resumes. A run that comes to its end
all the same is compared with one that nobody killed, metrics and weights bit for bit (`--deterministic`,
CPU, float32), and another one is begun.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from benchmarks.adaptive_vs_static import describe_machine
from pat_jax.common.devices import configure
from pat_jax.run.metrics import read_metrics

# What is under way where a function of this name, in a file whose path ends like this, is.
STAGES = {
    "compile": ("run/loop.py", "compile"),
    "warm start": ("run/warm_start.py", "warm_start"),
    "restore": ("run/open_run.py", "restore"),
    "warm-up": ("run/loop.py", "warm_up"),
    "prefill": ("engine/device_executor.py", "prefill"),
    "burst": ("engine/device_executor.py", "collect"),
    "switch": ("engine/rollout.py", "_switch"),
    "reward": ("run/scoring.py", "wait_for_rewards"),
    "update": ("training/trainer.py", "update"),
    "transfer": ("training/trainer.py", "transfer"),
    "checkpoint": ("run/open_run.py", "save"),
    "end": ("run/loop.py", "finish"),
}
ONLY_FIRST = ("compile", "warm start")  # of a run that has saved nothing yet, or once a process
LATEST_MS = {
    "burst": 2.0,
    "prefill": 2.0,
    "reward": 2.0,
    "transfer": 5.0,
}  # after it has begun; else 40
WITHIN = 3  # iterations of a process
STEPS = 10
OPTIONS = (
    *("--preset", "demo", "--model", "tiny", "--devices", "2", "--deterministic", "--seed", "3"),
    *("--warm_start.steps", "6", "--warm_start.batch_size", "8", "--rollout.compile", "all"),
    *("--rollout.prompts_per_step", "4", "--rollout.num_generations", "2"),
    *("--rollout.max_completion_length", "56", "--rollout.min_rows", "4"),
    *("--rollout.min_length", "128", "--rollout.prefill_blocks", "16"),
    *("--algorithm.mini_batch_size", "4", "--algorithm.tokens_per_micro_batch", "1024"),
    *("--layout", "auto", "--switch_to", "dp1tp2", "--switch_at", "3"),
    *("--eval.every", "4", "--eval.num_prompts", "8", "--checkpoint.every", "1"),
    *("--steps", str(STEPS)),
)
# In a process of its own, and slow enough to die in.
REWARD = """
import time
def slow(prompts, completions, **columns):
    time.sleep(0.02)
    return [float(len(text) % 3) for text in completions]
"""


def main() -> None:
    if sys.argv[1:2] == ["victim"]:
        victim(*sys.argv[2:5], sys.argv[5:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = describe_machine(configure(0))
    with tempfile.TemporaryDirectory() as folder:
        report = kills(Path(folder), args.kills, random.Random(args.seed))
    print(json.dumps(report, indent=1))
    if args.out:
        command = "python -m benchmarks.kills " + " ".join(sys.argv[1:])
        about = {"command": command, "machine": machine}
        args.out.write_text(json.dumps(about | report, indent=1) + "\n")


def kills(folder: Path, count: int, moment: random.Random) -> dict[str, Any]:
    """Until so many have died, by turns in each stage."""
    (folder / "reward.py").write_text(REWARD)
    whole = folder / "whole"
    _process(whole, "none", 0.0, 0)
    expected = outcome(whole)
    died, same, runs, started = Counter[str](), 0, 0, time.perf_counter()
    wanted = _by_turns(moment)
    while sum(died.values()) < count:
        run = folder / f"run{runs}"
        runs += 1
        is_over = False
        while not is_over:
            stage = next(wanted) if sum(died.values()) < count else "none"
            late = moment.random() * LATEST_MS.get(stage, 40.0)
            is_over = not _process(run, stage, late, moment.randrange(WITHIN))
            died[stage] += not is_over
            print(f"{sum(died.values())} of {count} kills, {runs} runs", stage, flush=True)
        same += outcome(run) == expected
        shutil.rmtree(run)
    del died["none"]
    return {
        "kills": dict(sorted(died.items())),
        "kills_in_all": sum(died.values()),
        "runs_that_came_to_their_end": runs,
        "of_which_bit_for_bit_like_the_unkilled_one": same,
        "seconds": round(time.perf_counter() - started),
    }


def _by_turns(moment: random.Random) -> Iterator[str]:
    while True:
        stages = list(STAGES)
        moment.shuffle(stages)
        yield from stages


def _process(run: Path, stage: str, late_ms: float, nth: int) -> bool:
    """One process of a run, begun or resumed.

    Returns:
      Whether it was killed; the stage may not have come.
    """
    options = [*OPTIONS, "--run_dir", str(run), "--resume", "auto"]
    options += ["--reward", f"{run.with_name('reward.py')}:slow"]
    command = [sys.executable, "-m", "benchmarks.kills", "victim", stage, str(late_ms), str(nth)]
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
    whole = [*command, *options]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=300, env=environment)
    if done.returncode not in (0, -9):
        raise SystemExit(
            f"killed in {stage}, then: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done.returncode == -9


def outcome(run: Path) -> dict[str, Any]:
    """What must be the same: metrics but for the clock's readings, and a digest of the last state."""
    import jax

    from pat_jax.config.command_line import parse
    from pat_jax.run.checkpoint import Checkpointer
    from pat_jax.run.setup import build

    config = parse(["--config", str(run / "config.yaml")])
    setup = build(config, jax.devices()[: config.devices])
    with Checkpointer(run / "checkpoints", fingerprint=setup.fingerprint) as saved:
        step, state, _ = saved.restore({"train": setup.trainer.abstract_state})
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
    clocks = ("time", "tokens_per_s", "seconds", "timing/")
    rows = [
        {k: v for k, v in row.items() if not any(word in k for word in clocks)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    return {"step": step, "state": leaves, "metrics": rows}


def victim(stage: str, late_ms: str, nth: str, options: list[str]) -> None:
    """The command, in a process that kills itself."""
    from pat_jax import train

    sys.argv[1:] = options
    if stage != "none":
        file, function = STAGES[stage]
        main_thread = threading.main_thread().ident
        assert main_thread is not None

        def is_there() -> bool:
            return _runs(sys._current_frames().get(main_thread), file, function)

        sys.setswitchinterval(1e-4)  # the one that looks must get its turn
        times = 0 if stage in (*ONLY_FIRST, "restore", "warm-up", "end") else int(nth)
        killer = threading.Thread(target=_kill, args=(is_there, float(late_ms), times), daemon=True)
        killer.start()
    train.main()


def _runs(frame: FrameType | None, file: str, function: str) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name == function and code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def _kill(is_there: Callable[[], bool], late_ms: float, times: int) -> None:
    for _ in range(times):
        _wait(is_there)
        _wait(lambda: not is_there())
    _wait(is_there)
    time.sleep(late_ms / 1e3)
    os.kill(os.getpid(), 9)


def _wait(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
