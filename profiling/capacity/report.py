"""The report of `python -m pat_jax.plan` as numbers: to print, to plot, to keep as JSON.

Knows numbers and their sources. Does not know how they were found.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.predict.kernel_model import StepRange
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.comparison import Comparison

# No update on an accelerator was compared with its prediction; benchmarks/reports/costs.md has published numbers
# of other trainers.
RELIANCE = "No update of this engine has been measured on such a machine: not verified."


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes of one device while the largest program of the update runs."""

    stage: str  # the program's name
    parameters: int  # of the role that is trained, as training keeps them
    optimizer: int
    gradients: int  # accumulated over micro-batches
    reference: int  # the frozen policy of the KL penalty, if it waits on the device
    base: int  # the policy under adapters
    temporaries: int  # what the program takes besides these
    is_least: bool  # nothing was compiled: temporaries are a lower bound
    limit: int  # memory of a device
    # Why the update does not fit and what would help, in a sentence; empty if it fits.
    shortage: str = ""
    tightness: str = ""  # the same, if it hardly fits
    offloaded: int = 0  # bytes of the optimizer that are in host memory between two steps
    drafts: int = 0  # a draft model, or the trained exit head of the first layers
    others: int = 0  # further roles that wait on the device

    @property
    def total(self) -> int:
        rest = self.optimizer + self.gradients + self.reference + self.base + self.drafts
        return self.parameters + rest + self.others + self.temporaries


@dataclass(frozen=True)
class Batches:
    """The batches of one iteration, on average over the replayed rollouts."""

    tokens: float  # of prompts and responses; a prompt that responses share counts once
    slots: float  # tokens of all micro-batches, padding included
    micro_batches: float
    largest: tuple[int, int]  # rows and length of the largest micro-batch
    steps: int  # number of optimizer steps

    @property
    def padding(self) -> float:
        """Share of the slots that hold padding."""
        return 1 - self.tokens / self.slots


@dataclass(frozen=True)
class Update:
    """The update of one iteration, with its seconds on average over the replayed rollouts."""

    split: Split
    fsdp: int  # devices that parameters are split over
    scored: tuple[str, ...]  # policies whose log-probabilities are computed before the first step
    batches: Batches
    scoring: Seconds
    gradients: Seconds
    apply: Seconds
    transfer: Seconds
    target: Split  # layout that the weights go to: the rollout's first
    flops: float  # operations of the forward and backward pass over the tokens, on all devices
    mfu: float  # `flops` over the seconds of the update without transfer, as a share of the peak
    memory: UpdateMemory
    others: tuple[tuple[str, Seconds], ...] = ()  # stages of other roles, by name

    @property
    def update_s(self) -> float:
        """Predicted seconds of what a run logs as the metric `timing/update`."""
        others = sum(seconds.total for _, seconds in self.others)
        return self.scoring.total + self.gradients.total + self.apply.total + others

    @property
    def total_s(self) -> float:
        return self.update_s + self.transfer.total


STAGES = {  # fields of an update, and what they are called
    "scoring": "log-probabilities",
    "gradients": "forward and backward",
    "apply": "optimizer",
    "transfer": "weights to the rollout",
}


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on a device."""

    name: str
    parameters: int  # with adapters, also the base model's, if no other role has it
    optimizer: int  # moments and counters; 0: the role is frozen
    moved: int  # to and from host memory in an iteration; 0: the role stays on devices


@dataclass(frozen=True)
class RestingIteration:
    """One iteration with models that wait on the devices, or in the host's memory."""

    rest: Literal["device", "host"]
    resident: int  # bytes of a device that models take during a rollout
    kv_cache: int  # bytes of a device, in the layout with most
    rollout_s: float | None  # mean of the adaptive rollouts; None: no layout fits
    update_s: float  # with the transfer, and with moves from the host and back

    @property
    def total_s(self) -> float | None:
        return None if self.rollout_s is None else self.rollout_s + self.update_s


@dataclass(frozen=True)
class Resting:
    """The models of a run, and its iterations for both values of `--roles.rest`."""

    chosen: Literal["device", "host"]  # the place that the rest of the plan assumes
    roles: tuple[RoleMemory, ...]
    iterations: tuple[RestingIteration, RestingIteration]  # device, host

    @property
    def gain(self) -> float | None:
        """How many times as fast iterations are with models in the host's memory; None: one of the
        two does not fit."""
        here, away = (each.total_s for each in self.iterations)
        return here / away if here and away else None


VERSION = 9  # of the JSON
SOURCES = {
    "compiler": "as the target's own compiler made them; GPU autotuning is off",
    "arithmetic": "shapes and shardings of the engine, nothing compiled",
}


@dataclass(frozen=True)
class PlanSubject:
    """The model, the machine and the rollout that are planned."""

    model: str
    target: str
    num_devices: int
    num_hosts: int
    chip: Mapping[str, float | str]  # as its maker describes it
    dtype: str
    sequences: int  # number of sequences of a rollout
    cap: int  # most tokens of a response
    longest_prompt: int
    is_trained: bool


@dataclass(frozen=True)
class LayoutMemory:
    """Bytes of one device in one layout; `programs` is 0 if nothing was compiled."""

    split: Split
    weights: int
    optimizer: int  # float32 parameters and the optimizer's state, while a rollout runs
    kv_cache: int
    programs: int  # most bytes that one program takes besides these
    whole: int  # sequences of full length that find pages at once
    refusal: str = ""  # why the layout is not used; empty if it is
    # Bytes for drafts: of the drafter and, if nothing was compiled, temporaries of a step.
    drafts: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.kv_cache + self.programs + self.drafts

    @property
    def is_used(self) -> bool:
        return not self.refusal


@dataclass(frozen=True)
class Memory:
    source: Literal["compiler", "arithmetic"]  # of `programs`; the rest is arithmetic
    limit: int  # bytes of a device
    usable: int
    layouts: tuple[LayoutMemory, ...]
    undivided: tuple[str, ...]  # why other layouts do not divide the model

    @property
    def reasons(self) -> list[str]:
        """The reasons why layouts are not used, one for each."""
        refused = [f"{one.split}: {one.refusal}" for one in self.layouts if one.refusal]
        return [*refused, *self.undivided]


@dataclass(frozen=True)
class StepTimes:
    """Predicted seconds of a decode step."""

    source: str  # coefficients, chip data or profile
    explained: str  # what `source` means
    range: StepRange | None  # of measured / predicted seconds; None: not verified
    splits: tuple[Split, ...]
    running: tuple[int, ...]  # sequences, evenly over the replicas
    contexts: tuple[int, ...]  # tokens
    # [context][running][split]; None if a layout has more replicas than there are sequences, or if
    # no bucket is so large
    seconds: tuple[tuple[tuple[float | None, ...], ...], ...]

    @property
    def margin(self) -> str:
        """The range as text, to print after a predicted number of seconds."""
        if self.range is None:
            return "not verified"
        return f"× {self.range.low:.2f} to {self.range.high:.2f}"

    @property
    def reliance(self) -> str:
        """How far the predictions can be relied on, in a sentence."""
        if self.range is None:
            return (
                "Too few steps of such a machine and such weights have been measured beside their "
                "predictions: not verified."
            )
        if not self.range.rows:
            return f"Measured steps took {self.margin} of what such a profile predicts."
        return (
            f"Measured steps took {self.margin} of what is predicted for them "
            f"({self.range.rows} steps, such chips, such weights; {self.range.own} of them of this engine)."
        )


@dataclass(frozen=True)
class LengthSummary:
    source: str
    mean: float  # tokens, cut at the cap
    quantiles: tuple[tuple[float, int], ...]  # (probability, tokens)
    share_cut: float  # share of the responses that are longer than the cap
    correlation: float  # of the normal scores of two samples' lengths
    samples_per_prompt: int


@dataclass(frozen=True)
class Iteration:
    """Mean seconds of a replayed iteration; rewards and the host's work are left out."""

    name: str  # the system: adaptive, or a static layout
    rollout_s: float
    update_s: float  # with the transfer of weights to the first layout of the adaptive rollout

    @property
    def total_s(self) -> float:
        return self.rollout_s + self.update_s

    @property
    def rollout_share(self) -> float:
        return self.rollout_s / self.total_s


@dataclass(frozen=True)
class PlanReport:
    command: str
    subject: PlanSubject
    memory: Memory
    programs: tuple[CompiledProgram, ...]  # empty if nothing was compiled
    versions: Mapping[str, str]  # of the compilers
    steps: StepTimes
    lengths: LengthSummary
    comparison: Comparison  # with at least one system
    update: Update | None  # None: nothing is trained
    limits: tuple[str, ...]  # what keeps the rollout from being faster, in sentences
    notes: tuple[str, ...] = ()  # assumptions, in sentences
    warnings: tuple[str, ...] = ()  # why a run may differ, in sentences
    resting: Resting | None = None  # None: no models besides the policy and its reference
    version: int = VERSION

    @property
    def iterations(self) -> list[Iteration]:
        """The rollout and the update of every system, the adaptive ones first; empty without
        training."""
        if self.update is None:
            return []
        update_s = self.update.total_s
        return [Iteration(x.name, x.mean_s, update_s) for x in self.comparison.systems]

    def to_json(self) -> str:
        steps = self.steps
        content = asdict(self) | {
            "sources": {**SOURCES, steps.source: steps.explained, "seconds": steps.reliance},
            "comparison": self.comparison.to_json(),
            "iterations": [asdict(each) for each in self.iterations],
        }
        return json.dumps(content, indent=1) + "\n"
