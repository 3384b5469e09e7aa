"""Kills a run at random moments of every stage, and sees whether it comes to what an unkilled one does.

    python -m benchmarks.contracts.kills --kills 200 --out benchmarks/results/kills.json
    python -m benchmarks.contracts.kills --kills 48 --by error --out benchmarks/results/errors.json

Each process of the run is told in which stage to die: in one of the first calls of that stage's function
it sends itself SIGKILL, a random time after the call has begun or as it returns. The next process resumes.
With `--by error` an error is raised there instead, before the call or as it returns, and no checkpoint is
due but at the end: what the run goes on from is what the error has saved. Of a step whose transfer fails
`train/transfer_gap` alone is not measured.
A run that comes to its end all the same is compared with one that nobody killed, metrics and weights bit
for bit (`--deterministic`, CPU, float32), and another one is begun.
"""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import machine, options, write
from pat_jax.common.devices import configure
from pat_jax.run.logging.metrics import read_metrics

# The function that is under way in each.
STAGES = {
    "compile": "pat_jax.run.loop:Run.compile",
    "warm start": "pat_jax.run.start.init_state:warm_start",
    "restore": "pat_jax.run.process.open_run:OpenRun.restore",
    "warm-up": "pat_jax.run.loop:Run.warm_up",
    "prefill": "pat_jax.engine.device_executor:DeviceExecutor.prefill",
    "burst": "pat_jax.engine.device_executor:DeviceExecutor.collect",
    "switch": "pat_jax.engine.rollout:_move",
    "reward": "pat_jax.run.collect:wait_for_rewards",
    "update": "pat_jax.training.trainer:Trainer.update",
    "transfer": "pat_jax.training.trainer:Trainer.transfer",
    "checkpoint": "pat_jax.run.process.open_run:OpenRun.save",
    "end": "pat_jax.run.loop:Run.finish",
}
ONCE = ("compile", "warm start", "restore", "warm-up", "end")  # a process
GOES_ON = ("checkpoint",)  # behind its function, in the background
# Milliseconds after its beginning, at the latest; else 40.
LATEST_MS = {"compile": 4000.0, "restore": 300.0, "warm-up": 500.0, "checkpoint": 80.0}
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
    *("--eval.every", "4", "--eval.num_prompts", "8", "--show_switch", "false"),
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
        stage, late_ms, nth, by, *words = sys.argv[2:]
        victim(stage, late_ms, nth, by, words)
        return
    parser = options(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--by", choices=("kill", "error"), default="kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    about = {"machine": machine(configure(0))}
    with tempfile.TemporaryDirectory() as folder:
        for report in kills(Path(folder), args.kills, args.by, random.Random(args.seed)):
            print(json.dumps(report, indent=1), flush=True)
            write(args.out, about | report)  # what has been seen so far


def kills(folder: Path, count: int, by: str, moment: random.Random) -> Iterator[dict[str, Any]]:
    """Until so many have died, by turns in each stage; what was seen after each whole run."""
    (folder / "reward.py").write_text(REWARD)
    whole = folder / "whole"
    _process(whole, "none", 0.0, 0, by)
    expected = outcome(whole, by)
    died, same, runs, started = Counter[str](), 0, 0, time.perf_counter()
    wanted = _by_turns(moment)
    while sum(died.values()) < count:
        run = folder / f"run{runs}"
        runs += 1
        is_over = False
        while not is_over:
            stage = next(wanted) if sum(died.values()) < count else "none"
            late = moment.random() * LATEST_MS.get(stage, 40.0)
            is_over = not _process(run, stage, late, moment.randrange(WITHIN), by)
            died[stage] += not is_over
            print(f"{sum(died.values())} of {count} kills, {runs} runs", stage, flush=True)
        same += outcome(run, by) == expected
        shutil.rmtree(run)
        yield {
            "kills": {stage: died[stage] for stage in STAGES},
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


def _process(run: Path, stage: str, late_ms: float, nth: int, by: str) -> bool:
    """One process of a run, begun or resumed.

    Returns:
      Whether it was killed; the stage may not have come.
    """
    words = [*OPTIONS, "--run_dir", str(run), "--resume", "auto"]
    words += ["--reward", f"{run.with_name('reward.py')}:slow"]
    words += ["--checkpoint.every", str(STEPS if by == "error" else 1)]
    victim = ["-m", "benchmarks.contracts.kills", "victim", stage, str(late_ms), str(nth), by]
    environment = os.environ | {"PYTHONFAULTHANDLER": "1"}
    whole = [sys.executable, *victim, *words]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=300, env=environment)
    code = -9 if by == "kill" else 1
    is_expected = by == "kill" or "OfTheTest" in done.stderr or not done.returncode
    if done.returncode not in (0, code) or not is_expected:
        raise SystemExit(
            f"killed in {stage}, then: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done.returncode == code


def outcome(run: Path, by: str) -> dict[str, Any]:
    """What must be the same: metrics but for the clock's readings, and a digest of the last state."""
    import jax

    from pat_jax.config.command_line import parse
    from pat_jax.run.checkpoints.checkpoint import Checkpointer
    from pat_jax.run.setup import build

    config = parse(["--config", str(run / "config.yaml")])
    setup = build(config, jax.devices()[: config.devices])
    with Checkpointer(run / "checkpoints", fingerprint=setup.fingerprint) as saved:
        step, state, _ = saved.restore({"train": setup.trainer.abstract_state})
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
    unmeasured = ("transfer_gap",) if by == "error" else ()
    clocks = ("time", "tokens_per_s", "seconds", "timing/", *unmeasured)
    rows = [
        {k: v for k, v in row.items() if not any(word in k for word in clocks)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    return {"step": step, "state": leaves, "metrics": rows}


def victim(stage: str, late_ms: str, nth: str, by: str, words: list[str]) -> None:
    """The command, in a process that kills itself."""
    from pat_jax import train
    from pat_jax.common.run_command import run_command

    sys.argv[1:] = words
    if stage != "none":
        dies = _killed if by == "kill" else _failing
        _arm(stage, float(late_ms) / 1e3, 0 if stage in ONCE else int(nth), dies)
    run_command(train.main)


class OfTheTestError(Exception):
    pass


def _arm(stage: str, late_s: float, nth: int, dies: Callable[..., Any]) -> None:
    """Has the process die in a call of the stage's function, or as it returns."""
    module, _, name = STAGES[stage].partition(":")
    *owners, last = name.split(".")
    owner = reduce(getattr, owners, import_module(module))
    function, calls = getattr(owner, last), itertools.count()

    def dying(*args: Any, **options: Any) -> Any:
        call = partial(function, *args, **options)
        return call() if next(calls) != nth else dies(stage, late_s, call)

    setattr(owner, last, dying)


def _killed(stage: str, late_s: float, call: Callable[[], Any]) -> Any:
    threading.Timer(late_s, _die).start()
    try:
        return call()
    finally:
        if stage not in GOES_ON:
            _die()


def _failing(stage: str, late_s: float, call: Callable[[], Any]) -> Any:
    del stage
    if int(late_s * 1e6) % 2:  # by chance
        call()
    raise OfTheTestError


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
