"""The part of a plan's report about the update: seconds of its stages, memory, utilisation.

Knows numbers and their sources. Does not know how they were found.
"""

from dataclasses import dataclass

from pat_jax.planning.types import Split
from pat_jax.profiling.predict.update_times import Seconds

# No update on an accelerator was compared with its prediction; docs/costs.md has published numbers
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
