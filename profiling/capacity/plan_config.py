"""Options of `python -m pat_jax.plan`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from pat_jax.common.options.declared import Options, auto, option
from pat_jax.common.rules import (
    COUNT_OR_ZERO,
    GIVEN,
    MEMORY_GIB,
    MOST_REPLAYED,
    ROLLOUTS,
    TOKENS,
    Rule,
    count,
    not_negative,
)
from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.algorithms import Name as AlgorithmName
from pat_jax.config.compute import Compute, MemoryOptions
from pat_jax.config.critic import (
    REWARD_MODEL,
    CriticAdapterConfig,
    CriticConfig,
    critic_source,
)
from pat_jax.config.lora import MOST_RANK, LoraConfig
from pat_jax.config.optimizer import OptimizerConfig, OptimizerState
from pat_jax.config.rollout import EngineSizes
from pat_jax.config.run import AlgorithmConfig, RolesConfig, RolloutConfig, RunConfig
from pat_jax.config.shared import UpdateOptions
from pat_jax.config.teacher import TeacherConfig
from pat_jax.profiling.capacity.of_run_config import of_run
from pat_jax.profiling.capacity.replay_options import ReplayOptions
from pat_jax.profiling.predict.targets import Target


@dataclass(frozen=True)
class PlannedAlgorithm(Options):
    """The algorithm of the update."""

    SECTION = "algorithm."

    name: AlgorithmName = "grpo"
    """Algorithm of the update; ppo trains a critic in addition to the policy. See --algorithm.name
    of train."""


@dataclass(frozen=True)
class PlannedCritic(Options):
    """The critic, which predicts values."""

    SECTION = "critic."

    model: str = ""
    """The critic of ppo, named as in --model. If it is empty: the first reward model, or else a
    model of the policy's shape."""
    lora: CriticAdapterConfig = field(default_factory=CriticAdapterConfig)


@dataclass(frozen=True)
class PlannedTeacher(TeacherConfig):
    """The frozen model that the policy is distilled from."""

    model: str = ""
    """A teacher that scores the tokens of every response, named as in --model. If it is empty,
    there is no teacher."""


REWARD_MODELS: Rule = (
    lambda names: all(x.startswith(REWARD_MODEL) and x != REWARD_MODEL for x in names),
    "model: and the name of a reward model",
)
LONGEST = 24_576  # tokens of a response, if the model's context has room for them


@dataclass(frozen=True)
class PlanConfig(ReplayOptions, UpdateOptions, EngineSizes):
    """Predicts rollouts on machines that you do not have: which layouts fit, how long a step takes,
    and what adapting the layout gains. Compiles the engine's own programs with the target's
    compiler (install it with the extra `plan`); with --compile false it computes from the model's
    configuration alone. Takes the YAML file of a training run as --config.

        python -m pat_jax.plan --model llama-3.1-8b --target h100:8 --responses 1024 --compile false
    """

    model: str = option("llama-3.1-8b", GIVEN)
    """A Hugging Face checkpoint directory, a model of the Hugging Face Hub (owner/name; only its
    config.json and tokenizer are downloaded), or a built-in shape (--help model)."""
    target: str = option("h100:8", GIVEN)
    """Kind and number of accelerators: h100:8, h100:8x4 (eight on each of four hosts), v5e:2x4,
    v5p:2x2x2; or a slice by Google's name, v5e-8."""
    responses: int = option(1024, count(1, MOST_REPLAYED))
    """Number of responses in one rollout."""
    max_completion_length: int = auto(TOKENS)
    """Maximum response length in tokens; longer responses are cut. Together with the longest prompt
    it must fit into the model's context. auto: 24,576, or what the prompt leaves of the context if
    that is less."""
    max_prompt_length: int = option(1024, TOKENS)
    """Maximum prompt length in tokens."""
    rollouts: int = option(3, ROLLOUTS)
    """Number of rollouts to replay."""
    train: bool = True
    """The same devices also train: they keep master weights and optimizer state, and the training
    step is compiled."""
    lora_rank: int = option(0, count(0, MOST_RANK))
    """Rank of the adapters. They are trained in all linear layers, and the policy under them is
    frozen. 0 trains the whole policy. See --lora.rank of train."""
    beta: float = option(0.0, not_negative(1000))
    """Weight of the KL penalty to a frozen reference policy, which is kept in memory and scores
    every response. With 0 there is no reference. See --algorithm.beta of train."""
    algorithm: PlannedAlgorithm = field(default_factory=PlannedAlgorithm)
    critic: PlannedCritic = field(default_factory=PlannedCritic)
    reward: tuple[str, ...] = option((), REWARD_MODELS)
    """Reward models, each as model:NAME, where NAME is as in --model. Leave out reward functions,
    which use no device."""
    teacher: PlannedTeacher = field(default_factory=PlannedTeacher)
    roles: RolesConfig = field(default_factory=RolesConfig)
    mini_batch_size: int = option(0, COUNT_OR_ZERO)
    """Prompts in one optimizer step; 0 takes all prompts of a rollout. If there are several steps,
    the policy scores every response before the first. See --algorithm.mini_batch_size of train."""
    tokens_per_micro_batch: int = option(0, COUNT_OR_ZERO)
    """Tokens in one forward and backward pass, on all devices together; 0 takes one row of full
    length on each device. See --algorithm.tokens_per_micro_batch of train."""
    weights: Literal["auto", "int8", "fp8"] = "auto"
    """Data type of the weights in a rollout; see --rollout.weights of train."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the forward pass."""
    min_length: int = option(1024, TOKENS)
    device_memory_gib: float = option(0.0, MEMORY_GIB)
    """Memory of one device in GiB; 0 takes the number that its maker gives."""
    compile: bool = True
    """Compile the engine's programs for the target. false computes from the model's configuration
    alone, which takes seconds."""
    layers: Literal["few", "all"] = "few"
    """few: compile models of two and of four layers, and extrapolate to the whole model. Only the
    passes of training are compiled for the whole model. all: compile the whole model."""
    profile: str = ""
    """A file of `python -m pat_jax.profile` for this model on the same number of devices. If it is
    empty, step times are composed from kernel times."""
    sums: Literal["one-shot", "nccl", "ungraphed"] = "nccl"
    """How the GPUs of a host do all-reduces over NVLink. nccl: NCCL in a CUDA graph. one-shot: a
    serving engine's kernel for small all-reduces. ungraphed: NCCL outside of a CUDA graph."""
    run_dir: str = ""
    """Folder of the plan. If it is empty: runs/plan-MODEL-TARGET-<date-time>."""
    optimizer: OptimizerState = field(default_factory=OptimizerState)

    def __post_init__(self):
        super().__post_init__()
        self.need(
            "responses",
            self.responses % self.num_generations == 0,
            f"a multiple of --num_generations ({self.num_generations})",
        )
        if not self.train:
            names = ["lora_rank", "beta", "mini_batch_size", "tokens_per_micro_batch", "reward"]
            names += ["algorithm.name", "teacher.model", "roles.rest"]
            names += [f"optimizer.{each.name}" for each in fields(self.optimizer)]
            self.need_defaults(names, "with --train false, which trains nothing")
        self._check_roles()
        prompts = self.responses // self.num_generations
        self.need(
            "mini_batch_size",
            prompts % (self.mini_batch_size or prompts) == 0,
            f"0 or a divisor of the prompts of a rollout ({prompts})",
        )
        self.need(
            "layers",
            self.compile or self.layers == "few",
            "few with --compile false, which compiles nothing",
        )
        self.need(
            "sums",
            not self.profile or self.sums == PlanConfig.sums,
            f"{PlanConfig.sums} with --profile, which has the times of its own sums",
        )
        self.need(
            "prompt_tokens",
            self.prompt_tokens <= self.max_prompt_length,
            f"at most --max_prompt_length ({self.max_prompt_length})",
        )

    def _check_roles(self) -> None:
        """Raises OptionError if options name a role that the algorithm does not use."""
        distills = ALGORITHMS[self.algorithm.name]["distill_coef"] > 0
        self.need(
            "teacher.model",
            distills == (self.teacher.model != ""),
            f"{'a model' if distills else 'nothing'} with --algorithm.name {self.algorithm.name}",
        )
        self.need("teacher.top_k", distills or not self.teacher.top_k, "0 without a teacher")
        without = f"with --algorithm.name {self.algorithm.name}, which has no critic"
        if not self.has_critic:
            self.need_defaults(("critic.model", "critic.lora.rank"), without)

    @property
    def has_critic(self) -> bool:
        return ALGORITHMS[self.algorithm.name]["baseline"] == "critic"

    @property
    def critic_model(self) -> str:
        """The model whose weights the critic begins with, or empty for those of the policy."""
        return critic_source(self.critic.model, self.reward, self.model)

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters alone are trained."""
        return self.lora_rank > 0 and (not self.has_critic or self.critic.lora.rank > 0)

    @property
    def memory_options(self) -> MemoryOptions:
        """The options to suggest if the update does not fit into memory."""
        tokens = self.tokens_per_micro_batch
        return MemoryOptions(
            optimizer=self.optimizer,
            compute=Compute(self.compute_dtype, self.remat, self.scan_layers, self.experts),
            trains_adapters=self.trains_adapters,
            micro_batch=f"--tokens_per_micro_batch ({tokens})" if tokens else "",
            learned_from="prompts and responses",
        )

    def settled(self, context: int) -> "PlanConfig":
        """Returns these options with a number in place of each `auto`, for a model whose context
        has room for `context` tokens."""
        if self.max_completion_length is not None:
            return self
        longest = max(1, min(LONGEST, context - self.max_prompt_length))
        return replace(self, max_completion_length=longest)

    def of_run(self, run: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of the plan of a run by name: --config takes the YAML of a run as
        well. Options `given` to the plan itself win, and others of the run follow them."""
        return of_run(self, run, given)

    def run(self, target: Target) -> RunConfig:
        """Returns the options of the run that is planned."""
        prompts = self.responses // self.num_generations
        longest = self.max_prompt_length + self.max_completion_length
        whole = -(-longest // self.min_length) * self.min_length
        return RunConfig(
            model=self.model,
            train=self.train,
            **self.shared(UpdateOptions),
            lora=LoraConfig(rank=self.lora_rank),
            critic=CriticConfig(model=self.critic_model, lora=self.critic.lora),
            optimizer=OptimizerConfig(**self.optimizer.shared(OptimizerState)),
            compute_dtype=self.compute_dtype,
            run_dir=self.run_dir,
            speculation=self.speculation,
            rollout=RolloutConfig(
                prompts_per_step=prompts,
                num_generations=self.num_generations,
                max_prompt_length=self.max_prompt_length,
                max_completion_length=self.max_completion_length,
                weights=self.weights,
                prefill_blocks=128,
                **self.shared(EngineSizes),
            ),
            roles=self.roles,
            teacher=TeacherConfig(**self.teacher.shared(TeacherConfig)),
            algorithm=AlgorithmConfig(
                name=self.algorithm.name,
                **ALGORITHMS[self.algorithm.name],
                beta=self.beta,
                mini_batch_size=self.mini_batch_size or prompts,
                tokens_per_micro_batch=self.tokens_per_micro_batch or whole * target.num_devices,
            ),
        )
