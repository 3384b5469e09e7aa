"""Every option of a run: one frozen dataclass per concern, checked where it is declared.

Knows names, units, defaults and bounds. Does not know how they are parsed (`cli.py`) or used.
The string under a field is its help text on the command line.
"""

from dataclasses import dataclass, field
from typing import Literal

from pat_jax.rules import (
    COUNT,
    COUNT_OR_ZERO,
    FRACTION,
    GIVEN,
    LAYOUT,
    NOT_NEGATIVE,
    POSITIVE,
    check,
    matches,
    require,
)


@dataclass(frozen=True)
class RolloutConfig:
    """Generation: how many responses, how long, sampled how."""

    prompts_per_step: int = 32
    """Prompts in one iteration."""
    num_generations: int = 8
    """Responses sampled for each prompt (the group of GRPO)."""
    max_prompt_length: int = 96
    """Longest prompt in tokens; longer ones are filtered out and counted."""
    max_completion_length: int = 160
    """Longest response in tokens, cut there; with the longest prompt at most the model's context."""
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
    policy than the trained one, by train/behavior_gap; the loss does not correct for it."""
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
    compile: Literal["all", "lazy"] = "all"
    """Layouts compiled before the first iteration: all, or lazy: the one it starts in; others
    follow in the background once the planner finds that they would pay."""
    device_memory_gib: float = 0.0
    """Memory of one device in GiB; 0 asks the device. A layout is used only while it fits."""

    def __post_init__(self):
        check(self, "prompts_per_step num_generations", COUNT, "rollout.")
        check(self, "max_prompt_length max_completion_length", COUNT, "rollout.")
        check(self, "check_every burst_steps", COUNT, "rollout.")
        check(self, "page_size prefill_blocks", COUNT, "rollout.")
        check(self, "min_rows min_length", COUNT, "rollout.")
        check(self, "temperature device_memory_gib", NOT_NEGATIVE, "rollout.")
        check(self, "top_k max_logprobs kv_pages", COUNT_OR_ZERO, "rollout.")
        check(self, "top_p", (lambda x: 0 < x <= 1, "a number in (0, 1]"), "rollout.")
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


@dataclass(frozen=True)
class AlgorithmConfig:
    """GRPO (Shao et al. 2024, arXiv 2402.03300) and its common variants."""

    epsilon: float = 0.2
    """Lower clip of the probability ratio."""
    epsilon_high: float = 0.2
    """Upper clip of the probability ratio (DAPO's clip-higher when above epsilon)."""
    beta: float = 0.0
    """Weight of the KL penalty to the frozen reference policy; 0 keeps no reference in memory."""
    num_iterations: int = 1
    """Passes over each batch of rollouts (the inner epochs, mu in the paper)."""
    mini_batch_size: int = 32
    """Prompts in one optimizer step."""
    tokens_per_micro_batch: int = 8192
    """Token budget (rows x padded length, all devices together) of one forward-backward pass;
    gradients accumulate over the rest."""
    scale_rewards: Literal["group", "none"] = "group"
    """Divide centred rewards by the group's standard deviation (GRPO), or not (Dr. GRPO)."""
    loss_aggregation: Literal["token", "sequence"] = "token"
    """Average the loss over all tokens of a mini-batch (DAPO), or per sequence first (GRPO's
    paper)."""
    truncated: Literal["mask", "score"] = "score"
    """Responses cut at max_completion_length: leave them out of the loss, or score them like any
    other."""

    def __post_init__(self):
        check(self, "epsilon", FRACTION, "algorithm.")
        check(self, "epsilon_high", POSITIVE, "algorithm.")
        check(self, "beta", NOT_NEGATIVE, "algorithm.")
        check(self, "num_iterations mini_batch_size", COUNT, "algorithm.")
        check(self, "tokens_per_micro_batch", COUNT, "algorithm.")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, then a constant or cosine rate."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms and biases are exempt."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    max_grad_norm: float = 1.0
    """Global-norm gradient clipping."""

    def __post_init__(self):
        check(self, "learning_rate weight_decay", NOT_NEGATIVE, "optimizer.")
        check(self, "warmup_steps", COUNT_OR_ZERO, "optimizer.")
        check(self, "max_grad_norm", POSITIVE, "optimizer.")
        check(self, "b1 b2", (lambda x: 0 <= x < 1, "a number in [0, 1)"), "optimizer.")


@dataclass(frozen=True)
class WarmStartConfig:
    """A short supervised stage on generated demonstrations (built-in tasks only)."""

    steps: int = 0
    """Supervised steps before reinforcement learning; 0 skips the stage."""
    batch_size: int = 64
    """Demonstrations in one supervised step, at most; those of like length go together."""
    learning_rate: float = 1e-3
    """Peak learning rate of the supervised stage (cosine to zero)."""

    def __post_init__(self):
        check(self, "steps", COUNT_OR_ZERO, "warm_start.")
        check(self, "batch_size", COUNT, "warm_start.")
        check(self, "learning_rate", NOT_NEGATIVE, "warm_start.")


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation."""

    every: int = 20
    """Iterations between two evaluations; 0 evaluates never. The first and the last policy are
    always evaluated otherwise."""
    num_prompts: int = 256
    """Held-out prompts, kept apart from training."""
    temperature: float = 1.0
    """Sampling temperature of the evaluation; 0 is greedy."""

    def __post_init__(self):
        check(self, "every", COUNT_OR_ZERO, "eval.")
        check(self, "num_prompts", COUNT, "eval.")
        check(self, "temperature", NOT_NEGATIVE, "eval.")


@dataclass(frozen=True)
class CheckpointConfig:
    """Orbax checkpoints of everything a resumed run needs."""

    every: int = 50
    """Iterations between two checkpoints; the last iteration is always saved."""
    max_to_keep: int = 2
    """Checkpoints kept."""
    export_dir: str = ""
    """Write the final policy here as a Hugging Face directory; empty writes none."""

    def __post_init__(self):
        check(self, "every max_to_keep", COUNT, "checkpoint.")


@dataclass(frozen=True)
class RunConfig:
    """One run of `python -m pat_jax.train`."""

    model: str = "demo"
    """A Hugging Face checkpoint directory, or the name of a built-in shape that starts from random
    weights."""
    data: str = "arithmetic"
    """A JSON, JSON-lines or Parquet file of problems, or the name of a built-in task."""
    reward: str = "auto"
    """`module:function`, `math`, `exact`, or auto (the task's own; math for files)."""
    reward_timeout: float = 10.0
    """Seconds one response may take to score before it is killed, logged and given 0: by the clock,
    beside a rollout that may use the same cores."""
    steps: int = 100
    """Iterations: rollout, reward, update."""
    train: bool = True
    """False only generates: rollouts and rewards without updates."""
    seed: int = 0
    """Seed of parameters, data order and sampling."""
    layout: str = "auto"
    """auto plans the layout of every moment; `dp2tp4` pins one, whose groups are still kept even."""
    switch_to: str = ""
    """Comma-separated layouts of a scripted path (experiments); the planner is off."""
    switch_at: str = ""
    """Comma-separated live-sequence counts, one for each layout of switch_to, at which the scripted
    switch happens."""
    profile: str = "auto"
    """What the planner plans by: a file of `python -m pat_jax.profile`; auto takes the one that was
    measured for this model on these devices, if any; none measures a quick one while warming up."""
    devices: int = 0
    """Devices to use; 0 takes all (on CPU the largest power of two up to min(cores, 8))."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the forward pass; master weights are always float32."""
    remat: bool = True
    """Recompute each layer in the backward pass: less memory, a quarter more arithmetic."""
    run_dir: str = ""
    """Folder of the run; empty makes runs/<date-time>."""
    resume: bool = False
    """Continue the run in run_dir from its last checkpoint."""
    deterministic: bool = False
    """Frozen profile and simulated planner clock: a resumed run repeats bit for bit (CPU,
    float32)."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self):
        self._check_given("model data reward profile")
        check(self, "steps devices", COUNT_OR_ZERO)
        check(self, "reward_timeout", POSITIVE)
        check(self, "layout", matches(f"auto|{LAYOUT}", "auto or a layout such as dp4tp2"))
        path = matches(rf"|{LAYOUT}(,{LAYOUT})*", "layouts such as dp4tp2,dp2tp4")
        check(self, "switch_to", path)
        self._check_switch_at()
        require(
            not self.resume or self.run_dir != "",
            "run_dir",
            self.run_dir,
            "with --resume the folder of the run to continue",
        )
        require(
            not (self.deterministic and self.rollout.compile == "lazy"),
            "rollout.compile",
            self.rollout.compile,
            "all with --deterministic: when a layout is compiled depends on the clock",
        )
        prompts = self.rollout.prompts_per_step
        require(
            prompts % self.algorithm.mini_batch_size == 0,
            "algorithm.mini_batch_size",
            self.algorithm.mini_batch_size,
            f"a divisor of --rollout.prompts_per_step ({prompts})",
        )

    @property
    def is_planned(self) -> bool:
        """The planner chooses the layout of every moment."""
        return self.layout == "auto" and not self.switch_to

    def _check_given(self, names: str) -> None:
        check(self, names, GIVEN)

    def _check_switch_at(self) -> None:
        counts = self.switch_at.split(",") if self.switch_at else []
        layouts = self.switch_to.split(",") if self.switch_to else []
        require(
            len(counts) == len(layouts) and all(n.isdecimal() for n in counts),
            "switch_at",
            self.switch_at,
            f"one live-sequence count for each layout of --switch_to ({self.switch_to!r})",
        )
