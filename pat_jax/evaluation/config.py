"""Options of `python -m pat_jax.evaluate`, and how they become those of a run."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.options.declared import auto
from pat_jax.common.rules import (
    COUNT_OR_ZERO,
    DEVICES,
    GIVEN,
    LAYOUT,
    MOST_RESPONSES,
    RESPONSES,
    SEED,
    STEPS,
    TEMPERATURE,
    TOKENS,
    Rule,
    check,
    check_context,
    matches,
    require,
)
from pat_jax.config.data import DataConfig
from pat_jax.config.evaluation import REWARD, EvalConfig, check_samples_differ
from pat_jax.config.rewards import check_rewards
from pat_jax.config.rollout import ComputeDtype
from pat_jax.config.run import AlgorithmConfig, RolloutConfig, RunConfig
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.models.config import ModelConfig

SHORTEST_CACHE = 256  # tokens; fewer and longer buckets compile sooner
TOP_P: Rule = (lambda x: 0 < x <= 1, "a number in (0, 1]")


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluates a model on files of problems: the rewards of several samples of each, pass@k, majority
    votes, and how sure they are.

        python -m pat_jax.evaluate --model Qwen/Qwen2.5-0.5B-Instruct \\
            --data examples/problems.jsonl --num_generations 8
    """

    model: str = ""
    """A Hugging Face checkpoint directory, such as a run's export, or a model of the Hugging Face Hub
    (owner/name); with --run_dir, unless given, the one that the run began with."""
    run_dir: str = ""
    """Folder of a run of `python -m pat_jax.train` or `pat_jax.sft` whose policy is evaluated, from its
    checkpoint; nothing there is changed, and the run may be going on."""
    checkpoint: int | None = None
    """Step of the run's checkpoint. Unless given the newest that is whole."""
    adapter: str = ""
    """A PEFT adapter directory, or one of the Hugging Face Hub (owner/name); the adapters are merged into the weights of --model."""
    out: str = ""
    """Folder for results.json and completions.jsonl; empty makes evaluations/<date-time>."""
    resume: bool = False
    """Go on with the evaluation in --out that was killed, by the options that it was begun with: behind
    the responses that are there. The rewards are asked anew."""
    num_prompts: int = 0
    """Problems of each file, always the same ones; 0 takes all."""
    num_generations: int = 1
    """Samples of each problem."""
    pass_at: tuple[int, ...] = ()
    """Each k of the pass@k to report, at most --num_generations; none takes 1, 2, 4, 8 … and
    --num_generations."""
    pass_threshold: float = 1.0
    """Reward from which on a sample passes, for pass@k and maj@k."""
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling mass; 1 turns it off."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 turns it off."""
    max_prompt_length: int = auto()
    """Longest prompt in tokens; problems with longer ones are left out and counted. auto: 1,024, or half
    of the model's context if that is less."""
    max_completion_length: int = auto()
    """Longest response in tokens, cut there. auto: 2,048, or what the prompt leaves of the context if
    that is less."""
    reward: tuple[str, ...] = ("auto",)
    """As of `python -m pat_jax.train`; auto is math."""
    reward_weights: tuple[float, ...] = ()
    """A number for each of --reward; none stands for 1 each."""
    reward_timeout: float = 10.0
    """Seconds one response may take to score before it is killed and has no reward."""
    reward_workers: int = 0
    """Processes of each reward; 0 takes as many as there are cores."""
    reward_memory: float = 8.0
    """GiB that each of these processes may have; 0 is no limit."""
    reward_retries: int = 3
    """Further tries where an endpoint cannot be reached, is too busy or fails."""
    reward_token_env: str = ""
    """Name of an environment variable whose value endpoints are shown as a bearer token."""
    reward_skip_special_tokens: bool = True
    """Leave special tokens out of the texts that rewards and completions.jsonl are given; false keeps all
    but the one that ends a response."""
    seed: int = 0
    """Seed of sampling."""
    batch: int = 64
    """Sequences generated at once (rounded up to a multiple of the devices)."""
    layout: str = "auto"
    """auto plans the layout of every moment; `dp2tp4` pins one."""
    profile: str = "auto"
    """What the planner plans by: see `python -m pat_jax.train --help`."""
    devices: int = 0
    """Devices to use, of all processes together; 0 takes all (on CPU the largest power of two up
    to min(cores, 8) in each process)."""
    compute_dtype: ComputeDtype = "auto"
    """Weights and arithmetic. auto: with --run_dir those of the run, else bfloat16 on GPUs and TPUs and
    float32 on CPUs."""
    weights: Literal["auto", "int8", "fp8"] = "auto"
    """auto keeps the weights in compute_dtype; int8 and fp8 (e4m3) quantize those of linear layers."""
    num_completions_to_print: int = 0
    """Responses shown at the end."""
    data: DataConfig = field(default_factory=partial(DataConfig, ()))
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self):
        check(self, "profile", GIVEN)
        require(all(self.data.files), "data.files", " ".join(self.data.files), GIVEN[1])
        check(self, "reward", (lambda x: x != () and all(x), GIVEN[1]))
        check(self, "num_generations batch", RESPONSES)
        check(self, "num_prompts top_k num_completions_to_print", COUNT_OR_ZERO)
        check(self, "temperature", TEMPERATURE)
        check(self, "top_p", TOP_P)
        check(self, "pass_threshold", REWARD)
        check(self, "seed", SEED)
        self._check_policy()
        require(
            not self.resume or self.out != "",
            "out",
            self.out,
            "with --resume the folder to go on in",
        )
        check(self, "devices", DEVICES)
        check(self, "layout", matches(f"auto|{LAYOUT}", "auto or a layout such as dp4tp2"))
        for name in ("max_prompt_length", "max_completion_length"):
            if getattr(self, name) is not None:
                check(self, name, TOKENS)
        check_rewards(self)
        check_samples_differ(self.num_generations, self.temperature)
        self._check_pass_at()

    def _check_policy(self) -> None:
        has_run, step = self.run_dir != "", self.checkpoint
        if step is not None:
            check(self, "checkpoint", STEPS)
            require(has_run, "checkpoint", step, "with it the run that it is of, in --run_dir")
        alone = "none with --run_dir, whose checkpoint says which adapters it has"
        require(not has_run or not self.adapter, "adapter", self.adapter, alone)

    def _check_pass_at(self) -> None:
        n = self.num_generations
        require(
            all(1 <= k <= n for k in self.pass_at),
            "pass_at",
            " ".join(map(str, self.pass_at)),
            f"integers from 1 to --num_generations ({n}): pass@k is estimated from at least k samples",
        )
        require(
            n == 1 or self.top_k != 1,
            "top_k",
            self.top_k,
            f"0 or at least 2 with --num_generations {n}: greedy samples are all the same",
        )

    @property
    def ks(self) -> list[int]:
        """Each k of pass@k, in order."""
        n = self.num_generations
        powers = [1 << i for i in range(n.bit_length())]
        return sorted({*(self.pass_at or (*powers, n))})

    def check_given(self) -> None:
        """Raises UserError where there is nothing to evaluate, or nothing to evaluate on."""
        for name, value, what in (
            ("model", self.model or self.run_dir, "a Hugging Face checkpoint directory"),
            ("data", self.data.files, "files of problems"),
        ):
            if not value:
                other = ", or --run_dir with the folder of a run" if name == "model" else ""
                raise UserError(f"option --{name} is not given: expected {what}; add it{other}.")

    @property
    def model_options(self) -> RunConfig:
        """The options that say which model this is."""
        return RunConfig(
            model=self.model,
            run_dir=self.run_dir,
            layout=self.layout,
            train=False,
            data=self.data,
            seed=self.seed,
            compute_dtype=self.compute_dtype,
        )

    def run_config(self, model: ModelConfig, num_devices: int) -> RunConfig:
        """The options under the names that an evaluation in training goes by.

        Raises:
          UserError: prompt and response do not fit the model's context.
        """
        context = model.max_position
        prompt = self.max_prompt_length or min(1024, context // 2)
        response = self.max_completion_length or min(2048, max(context - prompt, 1))
        lengths = {"max_prompt_length": prompt, "max_completion_length": response}
        check_context(lengths, context, self.model)
        vocab = (
            lambda x: x <= model.vocab_size,
            f"at most the {model.vocab_size:,} tokens there are",
        )
        check(self, "top_k", vocab)
        batch, page = math.ceil(self.batch / num_devices) * num_devices, RolloutConfig.page_size
        return replace(
            self.model_options,
            reward=self.reward,
            reward_weights=self.reward_weights,
            reward_timeout=self.reward_timeout,
            reward_workers=self.reward_workers,
            reward_memory=self.reward_memory,
            reward_retries=self.reward_retries,
            reward_token_env=self.reward_token_env,
            reward_skip_special_tokens=self.reward_skip_special_tokens,
            profile=self.profile,
            speculation=self.speculation,
            rollout=RolloutConfig(
                prompts_per_step=batch,
                num_generations=1,
                max_prompt_length=prompt,
                max_completion_length=response,
                top_p=self.top_p,
                top_k=self.top_k,
                weights=self.weights,
                min_length=math.ceil(min(SHORTEST_CACHE, prompt + response) / page) * page,
            ),
            algorithm=AlgorithmConfig(mini_batch_size=batch),
            eval=EvalConfig(
                every=1,
                data=self.data.files,
                num_prompts=self.num_prompts or MOST_RESPONSES,
                num_generations=self.num_generations,
                temperature=self.temperature,
                pass_threshold=self.pass_threshold,
                num_completions_to_print=self.num_completions_to_print,
            ),
        )
