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
    """Softmax temperature of sampling; 0 is greedy."""
    top_p: float = option(1.0, TOP_P)
    """Sample among the fewest tokens whose probabilities add up to at least top_p; 1 turns it
    off."""
    top_k: int = option(0, COUNT_OR_ZERO)
    """Sample among the top_k most likely tokens; 0 turns it off."""


@dataclass(frozen=True)
class EngineSizes(Options):
    """What the programs of a rollout are compiled for."""

    page_size: int = option(16, TOKENS)
    """Tokens in one page of the KV cache."""
    min_rows: int = option(4, RESPONSES)
    """Smallest batch size, in sequences per replica, that programs are compiled for. A smaller
    number fits a shrinking batch more closely, but more programs are compiled."""
    min_length: int = option(64, TOKENS)
    """Smallest KV length, in tokens, that programs are compiled for, rounded up to whole pages.
    Compiled lengths double from here up to the longest sequence. GPUs and TPUs read only the pages
    in use: there, programs for the longest are measured at these lengths."""
    check_every: int = option(8, TOKENS)
    """Decode steps between two checks, on the device, of whether a burst should end early."""
    burst_steps: int = option(64, TOKENS)
    """Maximum number of decode steps in one burst (one call of a program), rounded up to a multiple
    of check_every."""
    expert_parallel: int = option(0, COUNT_OR_ZERO)
    """Number of devices over which the experts of a layer are divided, the same in all layouts.
    Other devices have copies. 0: as many devices of one host as the number of experts can be
    divided by."""
    expert_width: int = auto(COUNT)
    """Number of devices over which the width of each expert is divided, in addition to
    expert_parallel. This speeds up steps with few sequences and slows down steps with many
    (docs/models.md). auto: on GPUs the number with which a rollout is fastest according to the
    times that `plan` computes; elsewhere 1."""
    device_memory_gib: float = option(0.0, MEMORY_GIB)
    """Memory of one device in GiB; 0 asks the device. A layout is used only if it fits into this
    memory. Unless it is given, the KV caches of a CPU's devices take at most a quarter of the
    machine's memory."""

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
    """Number of prompts in one iteration."""
    num_generations: int = option(8, RESPONSES)
    """Number of responses sampled for each prompt (the group of GRPO)."""
    max_prompt_length: int = auto(TOKENS)
    """Maximum prompt length in tokens. Longer prompts are left out and counted. auto: 512 for a
    checkpoint directory or a model of the Hub, but at most half of its context; 96 for a built-in
    shape."""
    max_completion_length: int = auto(TOKENS)
    """Maximum response length in tokens; longer responses are cut. Together with the longest prompt
    it must fit into the model's context. auto: 1,024 for a checkpoint directory or a model of the
    Hub, or what the prompt leaves of its context if that is less; 160 for a built-in shape."""
    weights: Literal["auto", "int8", "fp8"] = "auto"
    """Data type of the weights in a rollout. auto: --compute_dtype. int8 and fp8 (e4m3): the
    weights of linear layers are quantized, with a scale for each output. The policy that generates
    then differs slightly from the policy that is trained. The metric train/behavior_gap shows by
    how much, and --algorithm.rollout_correction corrects for it."""
    kv_pages: int = option(0, COUNT_OR_ZERO)
    """Number of pages in the KV cache of a replica whose KV heads are not split. If a layout splits
    the KV heads over f devices, a replica has f times as many pages, and each page takes 1/f of the
    bytes on a device. 0 takes what the memory of a device allows, or what all sequences need at
    full length if that is less."""
    prefill_blocks: int = option(64, RESPONSES)
    """Number of KV cache pages that one prefill call fills in each replica."""
    compile: Literal["needed", "all"] = "needed"
    """Programs to compile before the first iteration. needed: a few for each layout, which are
    measured; rollouts compile the others when they need them. all: every program, which
    --deterministic and several processes always do."""
    check_integrity: bool = False
    """For debugging. Before each burst, check that all processes are about to do the same, drafts
    and their sources included. After each burst, check the bookkeeping of rows and pages of the KV
    cache. After each transfer of weights, compare the rollout's log-probability of one token with
    the trainer's."""

    @property
    def max_logprobs(self) -> int:
        """The largest number of likeliest tokens whose log-probabilities a request may ask for."""
        return 0

    @property
    def num_responses(self) -> int:
        """The number of responses in one iteration."""
        return self.prompts_per_step * self.num_generations

    @property
    def max_length(self) -> int:
        """The number of tokens of the longest prompt and the longest response together."""
        return self.max_prompt_length + self.max_completion_length

    @property
    def sampling_note(self) -> str:
        """A sentence for the user if the responses are no samples of the policy, else ""."""
        if self.top_p == 1 and not self.top_k:
            return ""
        return (
            f"note: --rollout.top_p {self.top_p:g} --rollout.top_k {self.top_k}: responses are drawn from a "
            "part of the policy's distribution, but the loss is of the whole one, which they are no "
            "exact samples of; ratios and train/behavior_gap are of the whole one"
        )

    def __post_init__(self):
        super().__post_init__()
        self.need(
            "num_generations",
            self.num_responses <= MOST_RESPONSES,
            f"at most {MOST_RESPONSES:,} responses of all --rollout.prompts_per_step "
            f"({self.prompts_per_step}) together",
        )


@dataclass(frozen=True)
class AskedRollout(RolloutConfig):
    """A rollout whose requests may ask for log-probabilities of the likeliest tokens."""

    max_logprobs: int = 0
