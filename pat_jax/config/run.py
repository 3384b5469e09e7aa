"""Every option of a run: one frozen dataclass per concern, checked where it is declared.

Knows names, units, defaults and bounds. Does not know how they are parsed (`command_line.py`) or used.
The string under a field is its help text on the command line.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.rules import (
    COUNT_OR_ZERO,
    DEVICES,
    GIVEN,
    LAYOUT,
    SEED,
    STEPS,
    check,
    count,
    matches,
    require,
)
from pat_jax.config.data import DataConfig
from pat_jax.config.evaluation import EvalConfig
from pat_jax.config.learning import (
    AlgorithmConfig,
    OptimizerConfig,
    WarmStartConfig,
    check_signal,
    learning_notes,
)
from pat_jax.config.lora import LoraConfig, check_lora
from pat_jax.config.rewards import check_rewards
from pat_jax.config.rollout import ComputeDtype, RolloutConfig
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.config.tracking import check_tracking


@dataclass(frozen=True)
class CheckpointConfig:
    """Orbax checkpoints of everything a resumed run needs."""

    every: int = 50
    """Iterations between two checkpoints; the last iteration is always saved."""
    max_to_keep: int = 2
    """Checkpoints kept."""
    export_dir: str = ""
    """Write the final policy here as a Hugging Face directory in --compute_dtype, or its adapters
    (--lora.export); empty writes none."""

    def __post_init__(self):
        check(self, "every max_to_keep", count(1, 10**9), "checkpoint.")


@dataclass(frozen=True)
class RunConfig:
    """Improves a language model by reinforcement learning: prompts, sampled responses, rewards, an
    update, and again. Without a model and data it is a demonstration that runs anywhere.

        python -m pat_jax.train --model Qwen/Qwen2.5-0.5B-Instruct --data openai/gsm8k:main/train
    """

    model: str = "demo"
    """A Hugging Face checkpoint directory; a model of the Hugging Face Hub, owner/name or
    owner/name@revision, which is taken from the cache of its client or downloaded there; or the name of
    a built-in shape that starts from random weights."""
    reward: tuple[str, ...] = ("auto",)
    """One or several, whose weighted sum counts: `module:function` or `path/to/file.py:function`;
    `http://host:port/path` of a program that scores; `math` (the response has ended, and its final
    answer, as `\\boxed{x}`, `<answer>x</answer>`, `#### x`, `Answer: x`, or `$x$` on the last line, has
    the answer's value); `math_lenient` (its last box or number has); `exact`; or auto (the task's own;
    math for files)."""
    reward_weights: tuple[float, ...] = ()
    """A number for each of --reward; none stands for 1 each. A negative one makes a penalty of it, 0
    measures it only."""
    reward_timeout: float = 10.0
    """Seconds one response may take to score before it is killed, logged and left out of baseline and
    loss: by the clock, beside a rollout that may use the same cores. Each try of an endpoint has them."""
    reward_workers: int = 0
    """Processes of each reward that score responses at the same time, or calls of an endpoint; 0 takes
    as many as there are cores."""
    reward_memory: float = 8.0
    """GiB that each of these processes may have, and each of its children; 0 is no limit."""
    reward_retries: int = 3
    """Further tries where an endpoint cannot be reached, is too busy (429) or fails (5xx), after 0.5,
    1, 2 … seconds, at most 30, or when their Retry-After says, within the time of a call."""
    reward_token_env: str = ""
    """Name of an environment variable whose value every endpoint of --reward is shown, as
    `Authorization: Bearer VALUE`; no file and no log has the value. Empty shows none."""
    reward_skip_special_tokens: bool = True
    """Leave special tokens out of the texts that rewards, completions.jsonl and samples are given; false
    keeps all but the one that ends a response."""
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
    """Devices to use, of all processes together; 0 takes all (on CPU the largest power of two up
    to min(cores, 8) in each process)."""
    compute_dtype: ComputeDtype = "auto"
    """Arithmetic of the forward pass; what is trained is kept in --optimizer.weight_dtype. auto:
    bfloat16 for a checkpoint directory or a model of the Hub on GPUs and TPUs, else float32."""
    remat: Literal["full", "attention", "dots", "none"] = "full"
    """What the backward pass keeps of each layer, the rest being computed anew: its input alone (full),
    the output of attention too, so that its kernel runs forward once (attention), the products with
    weights as well (dots), or all (none). Least memory first, least arithmetic last."""
    scan_layers: Literal["auto", "true", "false"] = "auto"
    """Run the layers of an update as a loop, which compiles in the time of one layer but reads their
    parameters from a copy in compute_dtype; auto does on TPUs, and on CPUs in float32, for models of at
    least 8 layers."""
    run_dir: str = ""
    """Folder of the run; empty makes runs/<date-time>."""
    log_completions: bool = False
    """Write every response with its prompt and its reward to completions.jsonl in the run folder."""
    log_samples_every: int = 20
    """Iterations between two looks at the responses to two prompts, with their rewards: on the page
    run.html in the run folder and in the trackers. The first iteration is shown too; 0 shows none."""
    show_switch: bool = False
    """After the run, on at least two devices of one process, make the next rollout twice, as planned and
    with a forced switch of layout, and show it on run.html beside a computed plan of eight H100s; nothing
    is learned of it."""
    trackers: tuple[str, ...] = ()
    """Where metrics go beside metrics.jsonl and TensorBoard: wandb, trackio or both. Offline by their own
    settings (WANDB_MODE=offline; Trackio keeps to this machine by itself)."""
    tracker_project: str = "pat_jax"
    """Name of the project there; a run is called like its folder."""
    resume: bool = False
    """Continue the run in run_dir from its last checkpoint; with `auto` if there is a run, else begin
    it: one command for the first start and every restart."""
    deterministic: bool = False
    """Frozen profile and simulated planner clock: a resumed run repeats bit for bit (CPU,
    float32)."""
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self):
        self._check_given()
        check(self, "steps", STEPS)
        check(self, "seed", SEED)
        check(self, "devices", DEVICES)
        check_rewards(self)
        check_tracking(self)
        check(self, "log_samples_every", COUNT_OR_ZERO)
        check(self, "layout", matches(f"auto|{LAYOUT}", "auto or a layout such as dp4tp2"))
        path = matches(rf"|{LAYOUT}(,{LAYOUT})*", "layouts such as dp4tp2,dp2tp4")
        check(self, "switch_to", path)
        self._check_switch_at()
        require(
            not self.switch_to or self.layout == "auto",
            "layout",
            self.layout,
            "auto with --switch_to, whose path begins in the first layout there is",
        )
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
        self._check_warmup()
        learns = self.train or self.warm_start.steps > 0
        check_lora(self.lora, self.optimizer, learns=learns, export_dir=self.checkpoint.export_dir)
        if self.train and self.steps:
            check_signal(self.rollout, self.algorithm)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one iteration."""
        batches = self.rollout.prompts_per_step // self.algorithm.mini_batch_size
        return batches * self.algorithm.num_iterations

    @property
    def optimizer_in_use(self) -> OptimizerConfig:
        """With its learning rate."""
        return self.optimizer.with_rate(1e-6, trains_adapters=self.lora.is_on)

    @property
    def trains_adapters(self) -> bool:
        """And nothing else."""
        return self.lora.is_on

    @property
    def micro_batch_option(self) -> str:
        """What sets the size of a micro-batch, and to what."""
        return f"--algorithm.tokens_per_micro_batch ({self.algorithm.tokens_per_micro_batch})"

    @property
    def learned_from(self) -> str:
        return "prompts and responses"

    @property
    def is_planned(self) -> bool:
        """The planner chooses the layout of every moment."""
        return self.layout == "auto" and not self.switch_to

    @property
    def keeps_unfinished(self) -> bool:
        """Responses of iterations that no checkpoint covers yet."""
        return self.rollout.keep_unfinished and not self.deterministic

    @property
    def learning_notes(self) -> list[str]:
        """What a person should know of what these options learn, a sentence each."""
        return learning_notes(self.rollout, self.algorithm) if self.train else []

    def _check_warmup(self) -> None:
        """Rates that never come to their peak are not those that were asked for."""
        updates = self.steps * self.updates_per_step
        require(
            not (self.train and self.steps) or self.optimizer.warmup_steps <= updates,
            "optimizer.warmup_steps",
            self.optimizer.warmup_steps,
            f"at most the {updates:,} optimizer steps of the run ({self.steps:,} --steps of "
            f"{self.updates_per_step})",
        )

    def _check_given(self) -> None:
        check(self, "model profile", GIVEN)
        require(self.reward != () and all(self.reward), "reward", " ".join(self.reward), GIVEN[1])
        self.data.check_given()

    def _check_switch_at(self) -> None:
        counts = self.switch_at.split(",") if self.switch_at else []
        layouts = self.switch_to.split(",") if self.switch_to else []
        require(
            len(counts) == len(layouts) and all(re.fullmatch(r"\d{1,7}", n) for n in counts),
            "switch_at",
            self.switch_at,
            f"one live-sequence count for each layout of --switch_to ({self.switch_to!r})",
        )
