"""The command `simulate --trace`: compares a recorded rollout's layouts with the oracle's path."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pat_jax.commands.simulate import write
from pat_jax.common.errors import UserError
from pat_jax.common.text_table import percent, text_table
from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.planning.latency.profile import read_profile
from pat_jax.profiling.capacity.simulate_config import SimulateConfig
from pat_jax.profiling.capacity.what_if import splits_of
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.regret import Regret, regret
from pat_jax.run.results.saved_run import SavedRun, read_trace


@dataclass(frozen=True)
class PathRegret:
    """The regret of one recorded rollout: its time over the oracle's, both by one profile."""

    trace: RolloutTrace
    profile: Path  # the file of the profile
    regret: Regret

    def __repr__(self) -> str:
        found = self.regret
        trace = self.trace
        switches = [f"{split} at step {step:,}" for step, split in found.best.switches]
        best = " -> ".join([str(found.best.start), *switches])
        header = ["path", "actual s", "predicted s", "best s", "regret s", "regret"]
        row = [" -> ".join(trace.path), trace.total_s, found.taken_s, found.best.total_s]
        words = (
            f"By the prices of {self.profile}, the path of this rollout takes {found.seconds:.3g} s "
            f"({percent(found.share)}) longer than the oracle's, {best}. "
            "All sequences are taken to find pages in the KV cache."
        )
        if any(trace.drafts.drafted):
            words += " Drafts are left out: each step generates one token of a sequence."
        return f"{words}\n\n{text_table(header, [[*row, found.seconds, percent(found.share)]])}"

    def to_json(self) -> dict[str, Any]:
        best = self.regret.best
        return {
            "profile": str(self.profile),
            "path": self.trace.path,
            "actual_s": self.trace.total_s,
            "predicted_s": self.regret.taken_s,
            "best_s": best.total_s,
            "best_start": str(best.start),
            "best_switches": [[step, str(split)] for step, split in best.switches],
            "regret_s": self.regret.seconds,
            "regret": self.regret.share,
        }


def path_regret(config: SimulateConfig) -> PathRegret:
    """Computes the regret of a recorded rollout. Raises UserError if the trace is not in a run's
    folder, lacks the lengths that a replay needs, or has layouts that the profile lacks."""
    path, profile = Path(config.trace), Path(config.profile)
    run = SavedRun(path.parent)
    trace = read_trace(path)
    if config.profile == SimulateConfig.profile:
        profile = path.parent / "profile.json"
    if not trace.sequences:
        raise UserError(
            f"option --trace is {config.trace!r}: it does not say how long each response was: it is of an "
            "older version, or the run was stopped in it; take one of a run that went through."
        )
    latency = read_profile(profile).latency
    rollout = run.config.rollout
    splits = splits_of(latency)
    if missing := set(trace.path) - set(map(str, splits)):
        raise UserError(
            f"option --profile is {str(profile)!r}: it has no times of {', '.join(sorted(missing))}, in "
            "which the rollout ran; measure them with python -m pat_jax.profile."
        )
    columns = np.array(trace.sequences).T
    cap = rollout.max_completion_length
    prompts, responses, prompt_id = columns[:3].astype(int)
    expected = columns[3] if len(columns) > 3 else None
    workload = Workload(prompts, responses, cap, prompt_id, expected)
    machine = Machine.of(latency, splits, rollout, capacity=trace.capacity)
    found = PathRegret(trace, profile, regret(workload, machine, trace))
    if config.out:
        write(Path(config.out), found.to_json())
    return found
