"""Kills a run at random moments of every stage, and sees whether it comes to what an unkilled one does.

    python -m benchmarks.contracts.kills --kills 200 --out benchmarks/results/kills.json
    python -m benchmarks.contracts.kills --kills 48 --by error --out benchmarks/results/errors.json
    python -m benchmarks.contracts.kills --kills 50 --algorithm ppo --out benchmarks/results/kills_ppo.json

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import machine, options, write
from pat_jax.common.devices import configure
from pat_jax.run.logging.metrics import read_metrics

# The function that is under way in each, and for which role it is called, if for several.
STAGES = {
    "compile": "pat_jax.run.opened:compile_run",
    "warm start": "pat_jax.run.start.init_state:_warm_start",
    "reference kept": "pat_jax.run.start.init_state:begin_reference",
    "restore": "pat_jax.run.process.open_run:OpenRun.restore",
    "warm-up": "pat_jax.run.opened:warm_up",
    "prefill": "pat_jax.engine.device_executor:DeviceExecutor.prefill",
    "burst": "pat_jax.engine.device_executor:DeviceExecutor.collect",
    "switch": "pat_jax.engine.rollout:_Loop.move",
    "reward": "pat_jax.run.collect:wait_for_rewards",
    "reference": "pat_jax.training.reader:Reader.read",
    "values": "pat_jax.training.trainer:Trainer.predict critic",
    "critic update": "pat_jax.training.trainer:Trainer.update critic",
    "update": "pat_jax.training.trainer:Trainer.update train",
    "transfer": "pat_jax.training.transfer:Transfer.__call__",
    "checkpoint": "pat_jax.run.process.open_run:OpenRun.save",
    "end": "pat_jax.run.opened:finish",
}
OF_PPO = ("reference kept", "reference", "values", "critic update")
ONCE = ("compile", "warm start", "reference kept", "restore", "warm-up", "end")  # a process
GOES_ON = ("checkpoint",)  # behind its function, in the background
# Milliseconds after its beginning, at the latest; else 40.
LATEST_MS = {"compile": 4000.0, "restore": 300.0, "warm-up": 500.0, "checkpoint": 80.0}
WITHIN = 3  # iterations of a process
STEPS = 10
OPTIONS = (
    *("--preset", "demo", "--model", "tiny", "--deterministic", "--seed", "3"),
    *("--warm_start.steps", "6", "--rollout.compile", "all"),
    *("--rollout.prompts_per_step", "4", "--rollout.num_generations", "2"),
    *("--rollout.max_completion_length", "56", "--rollout.min_rows", "4"),
    *("--rollout.min_length", "128", "--rollout.prefill_blocks", "16"),
    *("--algorithm.mini_batch_size", "4", "--algorithm.tokens_per_micro_batch", "1024"),
    *("--layout", "dp1tp2@3"),
    *("--eval.every", "4", "--eval.num_prompts", "8"),
    *("--steps", str(STEPS)),
)
# The policy waits for one iteration; β, the reward's moments and the reference are kept as well.
PPO = (
    *("--algorithm.name", "ppo", "--rollout.num_generations", "1", "--critic.pretrain_steps", "1"),
    *("--rollout.prompts_per_step", "8", "--algorithm.normalize_reward", "true"),
    *("--algorithm.beta", "0.05", "--algorithm.kl_target", "0.01", "--algorithm.kl_horizon", "40"),
)
# In a process of its own, and slow enough to die in.
REWARD = """
import time
def slow(prompts, completions, **columns):
    time.sleep(0.02)
    return [float(len(text) % 3) for text in completions]
"""


@dataclass(frozen=True)
class Case:
    """What a run learns by, and how its processes end."""

    algorithm: str
    by: str
    placement: str = "flatten"

    @property
    def stages(self) -> list[str]:
        return [stage for stage in STAGES if self.algorithm == "ppo" or stage not in OF_PPO]

    @property
    def words(self) -> list[str]:
        every = STEPS if self.by == "error" else 1
        of_ppo = PPO if self.algorithm == "ppo" else ()
        placed = ["--placement", self.placement, "--devices", str(self.devices)]
        return [*OPTIONS, *of_ppo, *placed, "--checkpoint.every", str(every)]

    @property
    def devices(self) -> int:
        """Two of them have rollouts."""
        return 2 if self.placement == "flatten" else 4


def main() -> None:
    if sys.argv[1:2] == ["victim"]:
        stage, late_ms, nth, by, *words = sys.argv[2:]
        victim(stage, late_ms, nth, by, words)
        return
    parser = options(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--by", choices=("kill", "error"), default="kill")
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--placement", choices=("flatten", "separate"), default="flatten")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    case, moment = Case(args.algorithm, args.by, args.placement), random.Random(args.seed)
    about = {"machine": machine(configure(case.devices))}
    with tempfile.TemporaryDirectory() as folder:
        for report in kills(Path(folder), args.kills, case, moment):
            print(json.dumps(report, indent=1), flush=True)
            write(args.out, about | report)  # what has been seen so far


def kills(folder: Path, count: int, case: Case, moment: random.Random) -> Iterator[dict[str, Any]]:
    """Until so many have died, by turns in each stage; what was seen after each whole run."""
    (folder / "reward.py").write_text(REWARD)
    whole = folder / "whole"
    _process(whole, "none", 0.0, 0, case)
    expected = outcome(whole, case)
    died, same, runs, started = Counter[str](), 0, 0, time.perf_counter()
    wanted = _by_turns(case.stages, moment)
    while died.total() < count:
        run = folder / f"run{runs}"
        runs += 1
        is_over = False
        while not is_over:
            stage = next(wanted) if died.total() < count else "none"
            late = moment.random() * LATEST_MS.get(stage, 40.0)
            is_over = not _process(run, stage, late, moment.randrange(WITHIN), case)
            died[stage] += not is_over
            print(f"{died.total()} of {count} kills, {runs} runs", stage, flush=True)
        same += outcome(run, case) == expected
        shutil.rmtree(run)
        yield {
            "kills": {stage: died[stage] for stage in case.stages},
            "kills_in_all": died.total(),
            "runs_that_came_to_their_end": runs,
            "of_which_bit_for_bit_like_the_unkilled_one": same,
            "seconds": round(time.perf_counter() - started),
        }


def _by_turns(stages: Sequence[str], moment: random.Random) -> Iterator[str]:
    while True:
        yield from moment.sample(stages, len(stages))


def _process(run: Path, stage: str, late_ms: float, nth: int, case: Case) -> bool:
    """One process of a run, begun or resumed.

    Returns:
      Whether it was killed; the stage may not have come.
    """
    words = [*case.words, "--run_dir", str(run), "--resume", "auto"]
    words += ["--reward", f"{run.with_name('reward.py')}:slow"]
    victim = [stage, str(late_ms), str(nth), case.by, *words]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.contracts.kills", "victim", *victim],
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
    )
    code = -9 if case.by == "kill" else 1
    is_expected = case.by == "kill" or "OfTheTest" in done.stderr or not done.returncode
    if done.returncode not in (0, code) or not is_expected:
        raise SystemExit(
            f"killed in {stage}, then: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done.returncode == code


def outcome(run: Path, case: Case) -> dict[str, Any]:
    """What must be the same: metrics but for the clock's readings, and the last states."""
    import jax

    from pat_jax.config.command_line import parse
    from pat_jax.run.checkpoints.checkpoint import Checkpointer
    from pat_jax.run.start.setup import build

    config = parse(["--config", str(run / "config.yaml")])
    setup = build(config, jax.devices()[: config.devices])
    with Checkpointer(run / "checkpoints", fingerprint=setup.fingerprint) as saved:
        step, states, meta = saved.restore(setup.roles.abstract_states)
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(states)]
    unmeasured = ("transfer_gap",) if case.by == "error" else ()
    clocks = ("time", "tokens_per_s", "seconds", "timing/", *unmeasured)
    rows = [
        {k: v for k, v in row.items() if not any(word in k for word in clocks)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    return {"step": step, "states": leaves, "shaping": meta["shaping"], "metrics": rows}


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
    owner, name, role = function_of(stage)
    function, calls = getattr(owner, name), itertools.count()

    def dying(*args: Any, **options: Any) -> Any:
        call = partial(function, *args, **options)
        is_other = role and args[0].name != role
        return call() if is_other or next(calls) != nth else dies(stage, late_s, call)

    setattr(owner, name, dying)


def function_of(stage: str) -> tuple[Any, str, str]:
    """The owner and name of a stage's function, and the role that it is called for."""
    path, _, role = STAGES[stage].partition(" ")
    module, _, name = path.partition(":")
    *owners, last = name.split(".")
    return reduce(getattr, owners, import_module(module)), last, role


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
