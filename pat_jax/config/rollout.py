"""Options of generation: how many responses, how long, sampled how."""

from dataclasses import dataclass
from typing import Literal

from pat_jax.common.options.declared import auto
from pat_jax.common.rules import (
    COUNT_OR_ZERO,
    MEMORY_GIB,
    MOST_RESPONSES,
    RESPONSES,
    TEMPERATURE,
    TOKENS,
    check,
    require,
)

ComputeDtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class RolloutConfig:
    """Generation: how many responses, how long, sampled how."""

    prompts_per_step: int = 32
    """Prompts in one iteration."""
    num_generations: int = 8
    """Responses sampled for each prompt (the group of GRPO)."""
    max_prompt_length: int = auto()
    """Longest prompt in tokens; longer ones are filtered out and counted. auto: 512 for a checkpoint
    directory or a model of the Hub, at most half of its context; 96 for a built-in shape."""
    max_completion_length: int = auto()
    """Longest response in tokens, cut there; with the longest prompt at most the model's context. auto:
    1,024 for a checkpoint directory or a model of the Hub, at most what the prompt leaves of its
    context; 160 for a built-in shape."""
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling mass; 1 turns it off."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 turns it off."""
    max_logprobs: int = 0
    """Likeliest tokens whose log-probabilities a request may ask for; 0 compiles none in."""
    weights: Literal["auto", "int8", "fp8"] = "auto"
    """How the rollout keeps its copy of the weights: auto in compute_dtype; int8 and fp8 (e4m3)
    quantize those of linear layers, with a scale for each output. Responses then come from another
    policy than the trained one, by train/behavior_gap; --algorithm.rollout_correction corrects for it."""
    kv_carry: Literal["auto", "migrate", "recompute"] = "auto"
    """How the KV cache of unfinished sequences crosses a switch; auto takes the cheaper of the two
    by the latency model."""
    check_every: int = 8
    """Decode steps between two tests of the stop condition on the device."""
    burst_steps: int = 64
    """Most decode steps in one on-device burst."""
    page_size: int = 16
    """Tokens in one page of the KV cache."""
    kv_pages: int = 0
    """Pages in the KV cache of a data-parallel group where no KV heads are split (a layout that
    splits them in f ways has f times as many, each of 1/f the bytes of a device); 0 takes what the
    memory of a device allows, or what every sequence needs at full length if that is less."""
    prefill_blocks: int = 64
    """Pages of each data-parallel group computed by one prefill call."""
    min_rows: int = 4
    """Smallest row bucket of a data-parallel group, in sequences; smaller buckets follow the live
    batch further but compile more programs."""
    min_length: int = 64
    """Smallest KV length bucket in tokens; buckets double from here to the longest sequence."""
    compile: Literal["needed", "all", "lazy"] = "needed"
    """Programs compiled before the first iteration. needed: a few of each layout, which are measured;
    rollouts compile the others when they need them. lazy: those of the layout it starts in alone; other
    layouts follow in the background once the planner finds that they would pay. all: every one, as
    under --deterministic and with several processes."""
    keep_unfinished: bool = True
    """Write the responses of an iteration to the run folder as they end, with their scores: a run that is
    killed and resumed draws none of them again. Not under --deterministic, where what is left of a
    rollout would run in other rows, and round otherwise."""
    check_integrity: bool = False
    """Check the accounts of rows and pages of the KV cache after each burst, and before it that all
    processes of the run are about to do the same, drafts and what they come from included; and after each
    transfer of weights what the rollout says of a token. For debugging."""
    device_memory_gib: float = 0.0
    """Memory of one device in GiB; 0 asks the device. A layout is used only while it fits. KV caches of a
    CPU's devices take a quarter of the machine's memory at most unless this is given."""

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt and the longest response."""
        return self.max_prompt_length + self.max_completion_length

    def __post_init__(self):
        check(self, "prompts_per_step num_generations", RESPONSES, "rollout.")
        for name in ("max_prompt_length", "max_completion_length"):
            if getattr(self, name) is not None:
                check(self, name, TOKENS, "rollout.")
        check(self, "check_every burst_steps page_size min_length", TOKENS, "rollout.")
        check(self, "prefill_blocks min_rows", RESPONSES, "rollout.")
        check(self, "temperature", TEMPERATURE, "rollout.")
        check(self, "device_memory_gib", MEMORY_GIB, "rollout.")
        check(self, "top_k max_logprobs kv_pages", COUNT_OR_ZERO, "rollout.")
        check(self, "top_p", (lambda x: 0 < x <= 1, "a number in (0, 1]"), "rollout.")
        require(
            self.prompts_per_step * self.num_generations <= MOST_RESPONSES,
            "rollout.num_generations",
            self.num_generations,
            f"at most {MOST_RESPONSES:,} responses of all --rollout.prompts_per_step "
            f"({self.prompts_per_step}) together",
        )
        require(
            self.burst_steps % self.check_every == 0,
            "rollout.burst_steps",
            self.burst_steps,
            f"a multiple of --rollout.check_every ({self.check_every})",
        )
        require(
            self.min_length % self.page_size == 0,
            "rollout.min_length",
            self.min_length,
            f"a multiple of --rollout.page_size ({self.page_size})",
        )
