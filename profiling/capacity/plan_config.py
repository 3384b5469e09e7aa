"""Options of `python -m pat_jax.plan`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pat_jax.common.bars import note
from pat_jax.common.options.declared import auto, option, options_of
from pat_jax.common.options.files import Setting
from pat_jax.common.rules import (
    COUNT,
    GIVEN,
    MEMORY_GIB,
    MOST_REPLAYED,
    RESPONSES,
    ROLLOUTS,
    TOKENS,
    count,
)
from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.by_model import OF_CHECKPOINTS, KnownModel, Lengths, settled
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.rewards import SOME
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.run import RunConfig
from pat_jax.config.shared import ComputeDtype
from pat_jax.profiling.capacity.replay_options import ReplayOptions
from pat_jax.profiling.predict.targets import Target

USUAL = Lengths(1024, 24_576)
# Options of a run that would change its plan, but that a plan does not read.
UNREAD = ("layout", "devices", "profile", "placement.name")


@dataclass(frozen=True)
class PlannedRollout(RolloutConfig):
    """Generation: number and length of responses, and the sizes of programs."""

    prompts_per_step: int = option(128, RESPONSES)
    max_prompt_length: int = auto(TOKENS)
    """Maximum prompt length in tokens. auto: 1,024, but at most half of the model's context."""
    max_completion_length: int = auto(TOKENS)
    """Maximum response length in tokens; longer responses are cut. Together with the longest prompt
    it must fit into the model's context. auto: 24,576, or what the prompt leaves of the context if
    that is less."""
    prefill_blocks: int = option(128, RESPONSES)
    min_length: int = option(1024, TOKENS)
    check_every: int = option(16, TOKENS)
    burst_steps: int = option(256, TOKENS)
    device_memory_gib: float = option(0.0, MEMORY_GIB)
    """Memory of one device in GiB; 0 takes the number that its maker gives."""


@dataclass(frozen=True)
class PlannedAlgorithm(AlgorithmConfig):
    """The algorithm of the update, by name, and its parts."""

    tokens_per_micro_batch: int = auto(COUNT)
    """Maximum number of tokens (rows x padded length, on all devices together) in one forward and
    backward pass. auto: one row of full length on each device."""


@dataclass(frozen=True)
class PlanConfig(ReplayOptions, RunConfig):
    """Predicts rollouts on machines that you do not have: which layouts fit, how long a step takes,
    and what adapting the layout gains. Compiles the engine's own programs with the target's
    compiler (install it with the extra `plan`); with --compile false it computes from the model's
    configuration alone. Takes the YAML file of a training run as --config.

        python -m pat_jax.plan --model llama-3.1-8b --target h100:8 --responses 1024 --compile false
    """

    READ = f"""
        model target responses rollouts train compute_dtype reward seed compile layers profile sums
        run_dir lengths length_scale correlation prompt_tokens draft_acceptance speculation.*
        remat scan_layers fsdp_size experts roles.* teacher.* lora.rank lora.adapter
        critic.model critic.lora.rank optimizer.*_dtype optimizer.offload rollout.prompts_per_step
        rollout.num_generations rollout.max_* rollout.min_* rollout.weights rollout.kv_pages
        rollout.page_size rollout.prefill_blocks rollout.check_every rollout.burst_steps
        rollout.expert_* rollout.device_memory_gib algorithm.name algorithm.loss algorithm.beta
        algorithm.num_iterations algorithm.mini_batch_size algorithm.tokens_per_micro_batch
        algorithm.rollout_correction* algorithm.router_*
        {" ".join(f"algorithm.{part}" for part in ALGORITHMS["grpo"])}
    """

    model: str = option("llama-3.1-8b", GIVEN)
    """A Hugging Face checkpoint directory, a model of the Hugging Face Hub (owner/name; only its
    config.json and tokenizer are downloaded), or a built-in shape (--help model)."""
    target: str = option("h100:8", GIVEN)
    """Kind and number of accelerators: h100:8, h100:8x4 (eight on each of four hosts), v5e:2x4,
    v5p:2x2x2; or a slice by Google's name, v5e-8."""
    responses: int = auto(count(1, MOST_REPLAYED))
    """Number of responses in one rollout, in place of --rollout.prompts_per_step. auto: the
    responses to all prompts."""
    rollouts: int = option(3, ROLLOUTS)
    """Number of rollouts to replay."""
    compute_dtype: ComputeDtype = "auto"
    """Data type of the forward pass. auto: bfloat16."""
    reward: tuple[str, ...] = option(("auto",), SOME)
    """Rewards, as in a run. A plan has the models among them, model:NAME, where NAME is as in
    --model. Reward functions use no device."""
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
    rollout: RolloutConfig = field(default_factory=PlannedRollout)
    algorithm: AlgorithmConfig = field(default_factory=PlannedAlgorithm)

    def __post_init__(self):
        self._set_prompts()
        super().__post_init__()
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
            "lora.adapter",
            not (self.train and self.lora.adapter) or self.lora.rank > 0,
            "--lora.rank beside it, as a plan does not read the adapter",
        )

    def _set_prompts(self) -> None:
        """Sets the number of prompts by `responses`, if that is given."""
        size = self.rollout.num_generations
        if self.responses is None:
            self.need(
                "rollout.prompts_per_step",
                self.rollout.num_responses <= MOST_REPLAYED,
                f"at most {MOST_REPLAYED // size:,} with --rollout.num_generations {size}",
            )
            return
        self.need(
            "responses",
            0 < self.responses <= MOST_REPLAYED and self.responses % size == 0,
            f"a multiple of --rollout.num_generations ({size}) up to {MOST_REPLAYED:,}",
        )
        rollout = replace(self.rollout, prompts_per_step=self.responses // size)
        object.__setattr__(self, "rollout", rollout)

    @property
    def least_tokens(self) -> int:
        """The number of tokens of a row of full length on each device."""
        size = self.rollout.min_length
        return -(-self.rollout.max_length // size) * size * Target.parse(self.target).num_devices

    @property
    def micro_batch_option(self) -> str:
        """The option that sets the size of a micro-batch, or nothing if none can be smaller."""
        is_least = self.algorithm.tokens_per_micro_batch <= self.least_tokens
        return "" if is_least else super().micro_batch_option

    def settled(self, context: int) -> tuple["PlanConfig", str]:
        """Returns these options with a number in place of each `auto`, and a note as
        `by_model.settled` does. `context` is the number of tokens of the model's context."""
        model = KnownModel(self.model, is_checkpoint=True, context=context, platform="gpu")
        config, shorter = settled(self, model, USUAL)
        tokens = self.algorithm.tokens_per_micro_batch or config.least_tokens
        config = replace(
            config,
            algorithm=replace(self.algorithm, tokens_per_micro_batch=tokens),
            prompt_tokens=min(self.prompt_tokens, config.rollout.max_prompt_length),
        )
        return config, shorter

    def of_run(self, found: Mapping[str, Setting]) -> dict[str, Setting]:
        """Returns the options of a plan, if `found` are those in the file of a training run. What
        the file leaves open is as in the run."""
        rollout = RolloutConfig(
            max_prompt_length=OF_CHECKPOINTS.prompt, max_completion_length=OF_CHECKPOINTS.response
        )
        run = RunConfig(model=self.model, rollout=rollout)
        usual, own = (
            {option.name: [str(option.default)] for option in options_of(each)}
            for each in (run, self)
        )
        unread = [name for name in UNREAD if name in found and found[name].texts != usual[name]]
        if unread:
            note(f"note: a plan does not read these options of a run: --{', --'.join(unread)}")
        left = {
            name: Setting(usual[name])
            for name in own.keys() & usual.keys()
            if own[name] != usual[name]
        }
        read = own.keys() - {"profile", "run_dir"}
        return {name: one for name, one in {**left, **found}.items() if name in read}
