"""Every option of a training run: one frozen dataclass per concern, checked where it is declared.

Knows names, units, defaults and bounds. Does not know how they are parsed (`command_line.py`) or
used. The string under a field is its help text on the command line.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import GIVEN, LAYOUT, SEED, STEPS, matches
from pat_jax.config.any_run import AnyRun
from pat_jax.config.compute import MicroBatches
from pat_jax.config.critic import WithCritic, critic_source
from pat_jax.config.data import DataConfig
from pat_jax.config.engine import EngineChoice
from pat_jax.config.evaluation import EvalConfig
from pat_jax.config.learning import (
    DEMONSTRATIONS,
    AlgorithmConfig,
    WarmStartConfig,
    check_signal,
)
from pat_jax.config.placement import PlacementConfig
from pat_jax.config.rewards import RewardOptions
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.shared import ComputeDtype, LayoutChoice, Planned
from pat_jax.config.task import TaskChoice
from pat_jax.config.teacher import TeacherConfig


@dataclass(frozen=True)
class RolesConfig(Options):
    """Where the models of a run wait (docs/memory-speed.md)."""

    SECTION = "roles."

    rest: Literal["auto", "device", "host"] = "auto"
    """Where models are kept while no stage needs them: frozen models, the critic, and the policy's
    optimizer moments. host: in the host's memory, so that the KV cache can be larger; each model is
    copied to the devices before its stage. device: on the devices. auto: host, if the KV cache
    would otherwise have no room for all responses of an iteration at full length."""


_STEP = rf"{LAYOUT}@\d{{1,7}}"
LAYOUTS = matches(
    rf"auto|{LAYOUT}|{_STEP}(,{_STEP})*",
    "auto, a layout such as dp4tp2, or a path such as dp4tp2@64",
)


@dataclass(frozen=True)
class RunConfig(RewardOptions, Planned, AnyRun, WithCritic):
    """Trains a language model by reinforcement learning: it samples responses, scores them, updates
    the model, and repeats. Without a model and data, it runs a small demonstration on any machine.

        python -m pat_jax.train --model Qwen/Qwen2.5-0.5B-Instruct --data openai/gsm8k:main/train
    """

    LEARNING_RATE = 1e-6

    model: str = option("demo", GIVEN)
    """A Hugging Face checkpoint directory; a model of the Hugging Face Hub, owner/name or
    owner/name@revision, which is downloaded unless it is in the Hub's cache; or a built-in shape
    (--help model), which starts from random weights."""
    steps: int = option(100, STEPS)
    """Number of iterations, each with a rollout, its rewards and an update."""
    train: bool = True
    """false only generates responses and scores them, without updates."""
    seed: int = option(0, SEED)
    """Random seed of parameters, data order and sampling."""
    layout: str = option("auto", LAYOUTS)
    """auto: the planner chooses the layout, and changes it during a rollout. `dp2tp4` keeps one:
    two replicas, each with tensor parallelism (TP) over four devices. For experiments, a path: with
    `dp4tp2@64,dp2tp4@8`, a rollout begins with the least TP, and switches to these layouts once 64
    and 8 sequences are unfinished."""
    compute_dtype: ComputeDtype = "auto"
    """Data type of the forward pass; trained weights are kept in --optimizer.weight_dtype. auto:
    bfloat16 for a checkpoint directory or a model of the Hub on GPUs and TPUs, else float32."""
    log_completions: bool = False
    """Write every response with its prompt and reward to completions.jsonl in the run folder."""
    deterministic: bool = False
    """Make a resumed run repeat bit for bit (on CPU, in float32): the profile is frozen, and the
    planner's clock is simulated."""
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self):
        super().__post_init__()
        self._check_given()
        prompts = self.rollout.prompts_per_step
        self.need(
            "algorithm.mini_batch_size",
            prompts % self.mini_batch_size == 0,
            f"a divisor of --rollout.prompts_per_step ({prompts})",
        )
        self._check_horizon()
        self._check_critic()
        self._check_roles()
        self._check_warmup()
        self.need(
            "reward",
            "none" not in self.reward or not (self.train and self.algorithm.reward_coef),
            "a reward to learn from, unless --algorithm.reward_coef is 0 as with --algorithm.name distill",
        )
        self.teacher.check_use(self.algorithm.distill_coef if self.train else 0.0)
        self.placement.check_lag(
            train=self.train, deterministic=self.deterministic, top_k=self.teacher.top_k
        )
        if self.placement.lag and self.algorithm.rollout_correction == "none":
            corrected = replace(self.algorithm, rollout_correction="token_truncate")
            object.__setattr__(self, "algorithm", corrected)
        self._check_split()
        if self.train and self.steps:
            check_signal(self.rollout, self.algorithm)

    @property
    def learns(self) -> bool:
        return self.train or self.warm_start.steps > 0

    @property
    def trains_adapters(self) -> bool:
        """Whether every trained role trains adapters only."""
        has_critic = self.train and self.algorithm.has_critic
        return super().trains_adapters and (not has_critic or self.critic.lora.is_on)

    @property
    def mini_batch_size(self) -> int:
        """The number of prompts in one optimizer step."""
        return self.algorithm.mini_batch_size or self.rollout.prompts_per_step

    @property
    def updates_per_step(self) -> int:
        """The number of optimizer steps in one iteration."""
        batches = self.rollout.prompts_per_step // self.mini_batch_size
        return batches * self.algorithm.num_iterations

    @property
    def critic_updates(self) -> int:
        """The number of the critic's optimizer steps in the whole run."""
        return self.steps * self.updates_per_step

    @property
    def policy_updates(self) -> int:
        """The number of the policy's optimizer steps in the whole run."""
        return max(0, self.steps - self.critic.pretrain_steps) * self.updates_per_step

    @property
    def export_dirs(self) -> dict[str, str]:
        return super().export_dirs | {"critic": self.critic.export_dir}

    @property
    def micro_batch_option(self) -> str:
        return f"--algorithm.tokens_per_micro_batch ({self.algorithm.tokens_per_micro_batch})"

    @property
    def learned_from(self) -> str:
        return "prompts and responses"

    @property
    def micro_batches(self) -> MicroBatches:
        rollout = self.rollout
        return MicroBatches(
            tokens=self.algorithm.tokens_per_micro_batch,
            prompts=self.mini_batch_size,
            num_generations=rollout.num_generations,
            max_prompt_length=rollout.max_prompt_length,
            max_completion_length=rollout.max_completion_length,
            min_length=rollout.min_length,
            demonstrations=DEMONSTRATIONS if self.warm_start.steps else 0,
        )

    @property
    def layout_choice(self) -> LayoutChoice:
        if "@" not in self.layout:
            return LayoutChoice(self.layout)
        steps = (step.split("@") for step in self.layout.split(","))
        return LayoutChoice(path=tuple((name, int(running)) for name, running in steps))

    @property
    def engine(self) -> EngineChoice:
        """The options that the engine is built from; `dtype` is 'auto' until `auto` is settled."""
        return EngineChoice(
            model=self.model,
            rollout=self.rollout,
            speculation=self.speculation,
            layouts=self.layout_choice,
            lora=self.lora,
            dtype=self.compute_dtype,
            fsdp_size=self.fsdp_size,
            is_deterministic=self.deterministic,
        )

    @property
    def task(self) -> TaskChoice:
        return TaskChoice(
            model=self.model,
            data=self.data,
            eval=self.eval,
            rollout=self.rollout,
            reward=self.reward,
            seed=self.seed,
            demonstrations=self.warm_start.steps,
            learns=self.train,
            skips_special_tokens=self.reward_skip_special_tokens,
        )

    @property
    def on_one_base(self) -> tuple[Literal["reference", "critic"], ...]:
        """The roles whose adapters are on the same base weights as the policy's."""
        if not self.lora.is_on:
            return ()
        source = critic_source(self.critic.model, self.reward, self.model)
        is_shared = self.critic.lora.is_on and not source
        return ("reference", "critic") if is_shared else ("reference",)

    @property
    def num_redraws(self) -> int:
        """Most further batches to draw for groups without signal; 0 if nothing is trained."""
        return self.algorithm.dynamic_sampling if self.train else 0

    @property
    def sampling_note(self) -> str:
        """A sentence for the user if responses that train are no samples of the policy, else ""."""
        return self.rollout.sampling_note if self.train else ""

    def _check_split(self) -> None:
        """Raises OptionError if an option excludes `--placement split`."""
        for name, is_possible, otherwise in (
            ("train", self.train, "true"),
            ("algorithm.name", self.algorithm.has_critic, "ppo, which has a critic,"),
            ("teacher.top_k", not self.teacher.top_k, "0"),
            ("lora.rank", not self.lora.is_on, "0"),
            ("critic.lora.rank", not self.critic.lora.is_on, "0"),
        ):
            is_split = self.placement.name == "split"
            self.need(name, is_possible or not is_split, f"{otherwise} with --placement split")

    def _check_warmup(self) -> None:
        """Raises OptionError if the run ends before a learning rate reaches its peak."""
        for name, warmup, updates in (
            ("optimizer", self.optimizer.warmup_steps, self.policy_updates),
            ("critic", self.critic.warmup_steps, self.critic_updates),
        ):
            self.need(
                f"{name}.warmup_steps",
                not (self.train and self.steps) or warmup <= updates,
                f"at most the {updates:,} optimizer steps of the run "
                f"({updates // self.updates_per_step:,} --steps of {self.updates_per_step})",
            )

    def _check_critic(self) -> None:
        """Raises OptionError if an option of the critic has no critic, or does not fit the run."""
        if not self.algorithm.has_critic:
            self.check_no_critic(self.algorithm.baseline)
        source = critic_source(self.critic.model, self.reward, self.model)
        is_lost = self.critic.lora.is_on and not source and not self.lora.is_on
        self.need(
            "critic.lora.rank",
            not (is_lost and self.warm_start.steps),
            "0 with --warm_start.steps but no --lora.rank: the policy after that stage, which the "
            "adapters would be added to, is kept nowhere",
        )
        self.need(
            "critic.pretrain_steps",
            not (self.train and self.steps) or self.critic.pretrain_steps < self.steps,
            f"less than the {self.steps:,} --steps of the run, of which the others train the policy",
        )

    def _check_roles(self) -> None:
        """Raises OptionError if an option is of a model that the run does not have."""
        self.placement.check_roles(
            critic=self.algorithm.has_critic,
            reference=self.algorithm.beta > 0,
            teacher=self.teacher.model != "",
            reward=self.has_reward_model,
        )

    def _check_horizon(self) -> None:
        """Raises OptionError if one iteration could change the sign of an adaptive beta."""
        responses = self.rollout.num_responses
        self.need(
            "algorithm.kl_horizon",
            not self.algorithm.kl_target or 5 * self.algorithm.kl_horizon > responses,
            f"more than a fifth of an iteration's {responses:,} responses",
        )

    def _check_given(self) -> None:
        self.need("data.files", self.data.files != () and all(self.data.files), GIVEN[1])
