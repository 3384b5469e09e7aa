"""The result of --show_switch, a rollout as planned and with a forced switch: files and sentences.

Knows numbers and names. Does not know how a rollout is made (`commands/show_switch.py`).
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pat_jax.common.files import replace_text
from pat_jax.common.text_table import percent
from pat_jax.engine.record.trace import Move, RolloutTrace
from pat_jax.run.checkpoints.json_state import declared, read_kept

CARRIED = {"migrate": "migrated", "recompute": "recomputed", "mixed": "migrated and recomputed"}
SWITCH_FILE = "switch.json"
SWITCH_PICTURE = "switch.svg"


@dataclass(frozen=True)
class ComputedPlan:
    """The plan of a rollout on devices that this machine does not have."""

    command: str  # the command that computes this plan
    model: str
    target: str
    responses: int
    max_tokens: int  # of a response
    reliance: str  # a sentence on how reliable its seconds are
    planned_s: float
    static: tuple[tuple[str, float], ...]  # each layout, and the seconds of a rollout in it
    trace: RolloutTrace

    @property
    def best_static(self) -> tuple[str, float]:
        return min(self.static, key=lambda one: one[1])

    @property
    def words(self) -> str:
        name, seconds = self.best_static
        return (
            f"{self.responses} responses of up to {self.max_tokens:,} tokens of {self.model} on "
            f"{self.target}: {self.planned_s:.1f} s as planned ({' -> '.join(self.trace.path)}), {seconds:.1f} s "
            f"in {name}, the best static layout: {percent(1 - self.planned_s / seconds)} saved"
        )


@dataclass(frozen=True)
class ShownSwitch:
    step: int  # the step whose rollout this would have been
    is_cpu: bool
    reason: str  # the planner's first plan and its reason
    planned: RolloutTrace
    forced: RolloutTrace  # the same rollout with one forced switch
    responses: int
    tokens: int  # of all responses, each counted in the rollout where it is longer
    same_tokens: int  # of these, the ones before a response's first difference
    computed: ComputedPlan | None = None

    @property
    def switch(self) -> Move:
        return self.forced.switches[0]

    def lines(self) -> Iterator[str]:
        """Yields lines for the user: how many tokens are equal, and the measured seconds."""
        switch = self.switch
        sent = switch.sent.total if switch.sent else 0
        yield (
            f"one rollout of {self.responses} responses, made twice: as planned "
            f"({' -> '.join(self.planned.path)}), and with a switch forced at {switch.running} running "
            f"({switch.source} -> {switch.target}): {self.same_tokens:,} of {self.tokens:,} tokens are the same"
        )
        yield (
            f"the switch took {switch.seconds:.3f} s (weights resharded, KV cache {CARRIED[switch.kv]}, "
            f"{sent / 2**20:.1f} MiB moved); the rollout took {self.forced.total_s:.2f} s with "
            f"it, {self.planned.total_s:.2f} s as planned (one run each)"
        )
        if self.is_cpu and not self.planned.switches:
            yield (
                "on CPU devices a switch saves next to nothing for a policy this small, and the planner knows: "
                f"{self.reason}"
            )


def write_switch(folder: Path, shown: ShownSwitch) -> None:
    replace_text(folder / SWITCH_FILE, f"{json.dumps(asdict(shown))}\n")


def read_switch(folder: Path) -> ShownSwitch | None:
    """Reads the file, or returns None if there is none. Raises UserError if it is not as a run
    writes it."""
    path = folder / SWITCH_FILE
    return read_kept(path, "a rollout that was made twice", _of_fields) if path.is_file() else None


def _of_fields(fields: Any) -> ShownSwitch:
    shown = ShownSwitch(**fields)
    traces = {name: RolloutTrace.from_fields(fields[name]) for name in ("planned", "forced")}
    computed = fields["computed"]
    if computed is not None:
        computed = ComputedPlan(**computed)
        trace = RolloutTrace.from_fields(fields["computed"]["trace"])
        static = tuple((name, seconds) for name, seconds in computed.static)
        computed = replace(computed, trace=trace, static=static)
    found = declared(replace(shown, computed=computed, **traces))
    if not found.forced.switches:
        raise TypeError("its rollout with a switch has none")
    return found
