"""Options of generation: number and length of responses, sampling, and the engine's sizes."""

from dataclasses import dataclass
from typing import Literal

from pat_jax.common.options.declared import Options, auto, option
from pat_jax.common.rules import (
    COUNT,
    COUNT_OR_ZERO,
    MEMORY_GIB,
    MOST_RESPONSES,
    RESPONSES,
    TEMPERATURE,
    TOKENS,
    Rule,
)

TOP_P: Rule = (lambda x: 0 < x <= 1, "a number in (0, 1]")


@dataclass(frozen=True)
class SamplingOptions(Options):
    """How tokens are sampled."""

    temperature: float = option(1.0, TEMPERATURE)
    """Softmax temperature; 0 is greedy."""
    top_p: float = option(1.0, TOP_P)
    """Nucleus sampling mass; 1 turns it off."""
    top_k: int = option(0, COUNT_OR_ZERO)
    """Sample among the k most likely tokens; 0 turns it off."""


@dataclass(frozen=True)
class EngineSizes(Options):
    """What the programs of a rollout are compiled for."""

    page_size: int = option(16, TOKENS)
    """Tokens in one page of the KV cache."""
    min_rows: int = option(4, RESPONSES)
    """Smallest row bucket of a replica, in sequences; smaller buckets fit a shrinking batch more
    closely, but compile more programs."""
    min_length: int = option(64, TOKENS)
    """Smallest KV length bucket in tokens, rounded up to whole pages; buckets double from here to
    the longest sequence."""
    check_every: int = option(8, TOKENS)
    """Decode steps between two tests of the stop condition on the device."""
    burst_steps: int = option(64, TOKENS)
    """Most decode steps in one on-device burst, rounded up to a multiple of check_every."""
    expert_parallel: int = option(0, COUNT_OR_ZERO)
    """Devices over which the experts of a layer are divided, the same in all layouts; other devices
    have copies. 0: as many devices of a host as divide the experts."""
    expert_width: int = auto(COUNT)
    """Devices over which the width of each expert is divided in addition: steps of few sequences
    are faster, those of many slower (docs/models.md). auto: on GPUs the number with which a
    rollout is fastest by the prices of `plan`; elsewhere 1."""
    device_memory_gib: float = option(0.0, MEMORY_GIB)
    """Memory of one device in GiB; 0 asks the device. A layout is used only while it fits. KV
    caches of a CPU's devices take a quarter of the machine's memory at most unless this is
    given."""

    def __post_init__(self):
        super().__post_init__()
        for name, unit in (("burst_steps", "check_every"), ("min_length", "page_size")):
            value, divisor = getattr(self, name), getattr(self, unit)
            object.__setattr__(self, name, -(-value // divisor) * divisor)


@dataclass(frozen=True)
class RolloutConfig(SamplingOptions, EngineSizes):
    """Generation: number and length of responses, and sampling."""

    SECTION = "rollout."

    prompts_per_step: int = option(32, RESPONSES)
    """Prompts in one iteration."""
    num_generations: int = option(8, RESPONSES)
    """Responses sampled for each prompt (the group of GRPO)."""
    max_prompt_length: int = auto(TOKENS)
    """Longest prompt in tokens; longer ones are filtered out and counted. auto: 512 for a
    checkpoint directory or a model of the Hub, at most half of its context; 96 for a built-in
    shape."""
    max_completion_length: int = auto(TOKENS)
    """Longest response in tokens; longer ones are cut. Together with the longest prompt it has to
    fit into the model's context. auto: 1,024 for a checkpoint directory or a model of the Hub, or
    what the prompt leaves of its context if that is less; 160 for a built-in shape."""
    weights: Literal["auto", "int8", "fp8"] = "auto"
    """How the rollout keeps its copy of the weights: auto in compute_dtype; int8 and fp8 (e4m3)
    quantize those of linear layers, with a scale for each output. The policy that generates then
    differs from the trained one, by train/behavior_gap; --algorithm.rollout_correction corrects
    for it."""
    kv_pages: int = option(0, COUNT_OR_ZERO)
    """Pages in the KV cache of a replica whose KV heads are not split. A layout that splits them
    in f ways has f times as many, each of 1/f the bytes on a device. 0 takes what the memory of a
    device allows, or what every sequence needs at full length if that is less."""
    prefill_blocks: int = option(64, RESPONSES)
    """Pages of each replica computed by one prefill call."""
    compile: Literal["needed", "all"] = "needed"
    """Programs compiled before the first iteration. needed: a few of each layout, which are
    measured; rollouts compile the others when they need them. all: every program, as with
    --deterministic and with several processes."""
    check_integrity: bool = False
    """For debugging: before each burst, check that all processes are about to do the same, drafts
    and their sources included; after it, the accounts of rows and pages of the KV cache; after each
    transfer of weights, the rollout's log-probability of a token."""

    @property
    def max_logprobs(self) -> int:
        """The largest number of likeliest tokens whose log-probabilities a request may ask for."""
        return 0

    @property
    def max_length(self) -> int:
        """The number of tokens of the longest prompt and the longest response together."""
        return self.max_prompt_length + self.max_completion_length

    def __post_init__(self):
        super().__post_init__()
        self.need(
            "num_generations",
            self.prompts_per_step * self.num_generations <= MOST_RESPONSES,
            f"at most {MOST_RESPONSES:,} responses of all --rollout.prompts_per_step "
            f"({self.prompts_per_step}) together",
        )


@dataclass(frozen=True)
class AskedRollout(RolloutConfig):
    """A rollout whose requests may ask for log-probabilities of the likeliest tokens."""

    max_logprobs: int = 0
