"""Options of `python -m pat_jax.plan`."""

from dataclasses import dataclass
from typing import Literal

from pat_jax.common.rules import (
    GIVEN,
    MEMORY_GIB,
    MOST_REPLAYED,
    RESPONSES,
    ROLLOUTS,
    SEED,
    TOKENS,
    check,
    count,
    positive,
    require,
)
from pat_jax.config.lora import MOST_RANK, LoraConfig
from pat_jax.config.run import AlgorithmConfig, RolloutConfig, RunConfig
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.response_lengths import CORRELATION


@dataclass(frozen=True)
class PlanConfig:
    """Predicts rollouts on machines that are not there: which layouts fit, what a step takes, what
    adapting gains. Compiles the engine's own programs with the compiler of the target.

        python -m pat_jax.plan --model llama-3.1-8b --target h100:8 --responses 1024
    """

    model: str = "llama-3.1-8b"
    """A Hugging Face checkpoint directory, or the name of a built-in shape such as llama-3.1-8b."""
    target: str = "h100:8"
    """Accelerators and how many: h100:8, h100:8x4 (eight on each of four hosts), v5e:2x4, v5p:2x2x2."""
    responses: int = 1024
    """Responses of one rollout."""
    max_completion_length: int = 24_576
    """The cap in tokens at which a response is cut; with the longest prompt at most the model's context."""
    max_prompt_length: int = 1024
    """Longest prompt in tokens."""
    lengths: str = "reasoning"
    """Response lengths: a .csv, .json or .jsonl file, or reasoning, pat, math or short."""
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

    def __post_init__(self):
        check(self, "model target lengths", GIVEN)
        check(self, "responses", count(1, MOST_REPLAYED))
        check(self, "num_generations min_rows", RESPONSES)
        check(self, "max_completion_length max_prompt_length prompt_tokens", TOKENS)
        check(self, "page_size min_length burst_steps check_every", TOKENS)
        check(self, "rollouts", ROLLOUTS)
        check(self, "correlation", (lambda x: 0 <= x < 1, "a number in [0, 1)"))
        check(self, "length_scale", positive(1000))
        check(self, "device_memory_gib", MEMORY_GIB)
        check(self, "seed", SEED)
        require(
            self.responses % self.num_generations == 0,
            "responses",
            self.responses,
            f"a multiple of --num_generations ({self.num_generations})",
        )
        check(self, "lora_rank", count(0, MOST_RANK))
        require(
            self.train or not self.lora_rank,
            "lora_rank",
            self.lora_rank,
            "0 with --train false, which trains nothing",
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

    def run(self, target: Target) -> RunConfig:
        """The run that is planned."""
        prompts = self.responses // self.num_generations
        longest = self.max_prompt_length + self.max_completion_length
        whole = -(-longest // self.min_length) * self.min_length
        return RunConfig(
            model=self.model,
            train=self.train,
            lora=LoraConfig(rank=self.lora_rank),
            compute_dtype=self.compute_dtype,
            run_dir=self.run_dir,
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
            # One row of full length on each device.
            algorithm=AlgorithmConfig(
                mini_batch_size=prompts, tokens_per_micro_batch=whole * target.num_devices
            ),
        )
