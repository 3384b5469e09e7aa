"""Options of `python -m pat_jax.plan`."""

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

from pat_jax.common.options.declared import auto
from pat_jax.common.rules import (
    COUNT_OR_ZERO,
    FRACTION,
    GIVEN,
    MEMORY_GIB,
    MOST_REPLAYED,
    RESPONSES,
    ROLLOUTS,
    SEED,
    TOKENS,
    check,
    count,
    not_negative,
    positive,
    require,
)
from pat_jax.config.learning import OptimizerConfig
from pat_jax.config.lora import MOST_RANK, LoraConfig
from pat_jax.config.run import AlgorithmConfig, RolloutConfig, RunConfig
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.planning.drafts import PRIOR_SAID
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.draw import CORRELATION

LONGEST = 24_576  # tokens of a response, where the model's context has room for them


@dataclass(frozen=True)
class PlannedOptimizerConfig:
    """How the optimizer's state is kept."""

    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of both moments. See --optimizer.moment_dtype of train."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the master weights. See --optimizer.weight_dtype of train."""
    offload: bool = False
    """Keep both moments in the host's memory but for the optimizer's step. See --optimizer.offload of
    train."""


@dataclass(frozen=True)
class PlanConfig:
    """Predicts rollouts on machines that are not there: which layouts fit, what a step takes, what
    adapting gains. Compiles the engine's own programs with the compiler of the target, of the extra
    `plan`, or with --compile false counts shapes.

        python -m pat_jax.plan --model llama-3.1-8b --target h100:8 --responses 1024 --compile false
    """

    model: str = "llama-3.1-8b"
    """A Hugging Face checkpoint directory, a model of the Hugging Face Hub (owner/name), of which
    config.json and tokenizer are downloaded, or the name of a built-in shape such as llama-3.1-8b."""
    target: str = "h100:8"
    """Accelerators and how many: h100:8, h100:8x4 (eight on each of four hosts), v5e:2x4, v5p:2x2x2."""
    responses: int = 1024
    """Responses of one rollout."""
    max_completion_length: int = auto()
    """The cap in tokens at which a response is cut; with the longest prompt at most the model's context.
    auto: 24,576, or what the prompt leaves of the context if that is less."""
    max_prompt_length: int = 1024
    """Longest prompt in tokens."""
    lengths: str = ""
    """Response lengths: a .csv, .json or .jsonl file, or reasoning, pat, math or short; empty takes those of
    --responses_file, or reasoning."""
    responses_file: str = ""
    """Recorded responses, several to a prompt, a .jsonl, .json or .parquet file such as python -m
    pat_jax.generate writes: what drafts are worth is counted in them; empty takes what is built in."""
    draft_acceptance: float = PRIOR_SAID
    """How likely a token of a draft is right where those before it are, of drafts that a model says
    (--speculation.source model:DIR or early_exit:LAYER); those that are copied are counted."""
    length_scale: float = 1.0
    """Times that responses are longer than the file or the distribution says."""
    num_generations: int = 8
    """Responses to one prompt, whose lengths are alike."""
    correlation: float = CORRELATION
    """Correlation of the normal scores of two responses to one prompt; 0 makes them strangers."""
    prompt_tokens: int = 256
    """Length of every prompt, where the file of lengths has none; at most max_prompt_length."""
    rollouts: int = 3
    """Rollouts that are replayed."""
    train: bool = True
    """The same devices train: master weights and the optimizer stay there, and the training step is
    compiled."""
    lora_rank: int = 0
    """Adapters of this rank are trained, of all linear layers, and the policy under them is frozen; 0
    trains all of it. See --lora.rank of train."""
    beta: float = 0.0
    """Weight of the KL penalty to a frozen reference policy, which is kept in memory and scores every
    response; 0 keeps none. See --algorithm.beta of train."""
    mini_batch_size: int = 0
    """Prompts in one optimizer step; 0 takes all of a rollout. Before the first of several steps the
    policy scores every response. See --algorithm.mini_batch_size of train."""
    tokens_per_micro_batch: int = 0
    """Tokens of one forward and backward pass, all devices together; 0 is one row of full length on each.
    See --algorithm.tokens_per_micro_batch of train."""
    remat: Literal["full", "attention", "dots", "none"] = "full"
    """What the backward pass keeps of each layer, least first. See --remat of train."""
    scan_layers: Literal["auto", "true", "false"] = "auto"
    """Run the layers of an update as a loop. See --scan_layers of train."""
    weights: Literal["auto", "int8", "fp8"] = "auto"
    """How the rollout keeps its copy of the weights; see --rollout.weights of train."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Arithmetic of the forward pass."""
    page_size: int = 16
    """Tokens in one page of the KV cache."""
    min_rows: int = 4
    """Smallest row bucket of a data-parallel group, in sequences."""
    min_length: int = 1024
    """Smallest KV length bucket in tokens."""
    burst_steps: int = 256
    """Most decode steps in one on-device burst."""
    check_every: int = 16
    """Decode steps between two tests of the stop condition on the device."""
    device_memory_gib: float = 0.0
    """Memory of one device in GiB; 0 is what its maker says."""
    compile: bool = True
    """Compile the engine's programs for the target; false counts shapes alone and takes seconds."""
    layers: Literal["few", "all"] = "few"
    """few compiles models of two and of four layers and takes all numbers to be affine in the layers;
    all compiles the whole model."""
    profile: str = ""
    """A file of `python -m pat_jax.profile` for this model on as many devices; empty composes steps
    from kernel times."""
    data: str = "../shared/data"
    """A folder with calibration/, tables of measured kernel times; where it is not there,
    coefficients derived from them stand for it."""
    sums: Literal["one-shot", "nccl", "ungraphed"] = "one-shot"
    """How GPUs of a host sum: small sums by kernels of their own, by NCCL in a CUDA graph, or by NCCL
    outside of one."""
    seed: int = 0
    """Seed of the rollouts drawn."""
    run_dir: str = ""
    """Folder of the plan; empty makes runs/plan-MODEL-TARGET-<date-time>."""
    optimizer: PlannedOptimizerConfig = field(default_factory=PlannedOptimizerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self):
        check(self, "model target", GIVEN)
        check(self, "responses", count(1, MOST_REPLAYED))
        check(self, "num_generations min_rows", RESPONSES)
        check(self, "max_prompt_length prompt_tokens", TOKENS)
        if self.max_completion_length is not None:
            check(self, "max_completion_length", TOKENS)
        check(self, "page_size min_length burst_steps check_every", TOKENS)
        check(self, "rollouts", ROLLOUTS)
        check(self, "correlation", (lambda x: 0 <= x < 1, "a number in [0, 1)"))
        check(self, "length_scale", positive(1000))
        check(self, "device_memory_gib", MEMORY_GIB)
        check(self, "seed", SEED)
        check_draft_acceptance(self.draft_acceptance, self.speculation)
        require(
            self.responses % self.num_generations == 0,
            "responses",
            self.responses,
            f"a multiple of --num_generations ({self.num_generations})",
        )
        check(self, "lora_rank", count(0, MOST_RANK))
        check(self, "beta", not_negative(1000))
        check(self, "mini_batch_size tokens_per_micro_batch", COUNT_OR_ZERO)
        for name in ("lora_rank", "beta", "mini_batch_size", "tokens_per_micro_batch"):
            value = getattr(self, name)
            require(
                self.train or not value, name, value, "0 with --train false, which trains nothing"
            )
        for each in fields(self.optimizer):
            value = getattr(self.optimizer, each.name)
            require(
                self.train or value == each.default,
                f"optimizer.{each.name}",
                value,
                f"{str(each.default).lower()} with --train false, which trains nothing",
            )
        prompts = self.responses // self.num_generations
        require(
            prompts % (self.mini_batch_size or prompts) == 0,
            "mini_batch_size",
            self.mini_batch_size,
            f"0 or a divisor of the prompts of a rollout ({prompts})",
        )
        require(
            self.compile or self.layers == "few",
            "layers",
            self.layers,
            "few with --compile false, which compiles nothing",
        )
        require(
            not self.profile or self.sums == "one-shot",
            "sums",
            self.sums,
            "one-shot with --profile, which has the times of its own sums",
        )
        require(
            self.prompt_tokens <= self.max_prompt_length,
            "prompt_tokens",
            self.prompt_tokens,
            f"at most --max_prompt_length ({self.max_prompt_length})",
        )

    @property
    def trains_adapters(self) -> bool:
        """And nothing else."""
        return self.lora_rank > 0

    @property
    def micro_batch_option(self) -> str:
        """What sets the size of a micro-batch, and to what; empty where it is the least."""
        tokens = self.tokens_per_micro_batch
        return f"--tokens_per_micro_batch ({tokens})" if tokens else ""

    @property
    def learned_from(self) -> str:
        return "prompts and responses"

    def settled(self, context: int) -> "PlanConfig":
        """With nothing open.

        Args:
          context: tokens of the longest sequence that the model is for.
        """
        if self.max_completion_length is not None:
            return self
        longest = max(1, min(LONGEST, context - self.max_prompt_length))
        return replace(self, max_completion_length=longest)

    def run(self, target: Target) -> RunConfig:
        """The run that is planned."""
        prompts = self.responses // self.num_generations
        longest = self.max_prompt_length + self.max_completion_length
        whole = -(-longest // self.min_length) * self.min_length
        return RunConfig(
            model=self.model,
            train=self.train,
            remat=self.remat,
            scan_layers=self.scan_layers,
            lora=LoraConfig(rank=self.lora_rank),
            optimizer=OptimizerConfig(**asdict(self.optimizer)),
            compute_dtype=self.compute_dtype,
            run_dir=self.run_dir,
            speculation=self.speculation,
            rollout=RolloutConfig(
                prompts_per_step=prompts,
                num_generations=self.num_generations,
                max_prompt_length=self.max_prompt_length,
                max_completion_length=self.max_completion_length,
                weights=self.weights,
                check_every=self.check_every,
                burst_steps=self.burst_steps,
                page_size=self.page_size,
                prefill_blocks=128,
                min_rows=self.min_rows,
                min_length=self.min_length,
                device_memory_gib=self.device_memory_gib,
            ),
            algorithm=AlgorithmConfig(
                beta=self.beta,
                mini_batch_size=self.mini_batch_size or prompts,
                tokens_per_micro_batch=self.tokens_per_micro_batch or whole * target.num_devices,
            ),
        )


def check_draft_acceptance(asked: float, speculation: SpeculationConfig) -> None:
    """
    Raises:
      OptionError: it is no probability, or there are no drafts that it is of.
    """
    is_fraction, expected = FRACTION
    require(is_fraction(asked), "draft_acceptance", asked, expected)
    require(
        speculation.is_said or asked == PRIOR_SAID,
        "draft_acceptance",
        asked,
        f"{PRIOR_SAID} where no model says drafts; take --speculation.source model:DIR or "
        "early_exit:LAYER, or leave it out",
    )
