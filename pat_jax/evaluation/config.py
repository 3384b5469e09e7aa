"""Options of `python -m pat_jax.evaluate`, and their translation to options of a run."""

from dataclasses import dataclass, field, replace
from functools import partial

from pat_jax.common.errors import UserError
from pat_jax.common.options.declared import SHORT_FORM, auto, option
from pat_jax.common.rules import (
    COUNT_OR_ZERO,
    GIVEN,
    MOST_RESPONSES,
    RESPONSES,
    STEPS,
    TOKENS,
    check_context,
)
from pat_jax.config.data import DataConfig
from pat_jax.config.evaluation import EvalConfig, check_samples_differ
from pat_jax.config.generating import Generating
from pat_jax.config.rewards import RewardModelOptions, RewardOptions
from pat_jax.config.rollout import SamplingOptions
from pat_jax.config.run import RunConfig
from pat_jax.config.shared import ComputeDtype
from pat_jax.models.config import ModelConfig

_OF_PAIRS = ("data", "reward_model", "out", "devices", "compute_dtype", "distributed")


@dataclass(frozen=True)
class EvaluatedRewardModel(RewardModelOptions):
    """A reward model to evaluate, or options of the reward models of --reward."""

    model: str = field(default="", metadata=SHORT_FORM)
    """A reward model to evaluate in place of a policy: a Hugging Face checkpoint directory or a
    model of the Hub. The result is the share of the preference pairs of --data whose chosen
    response has the larger reward. If there is a column subset, each of its values has a share of
    its own, as in RewardBench (docs/reward-models.md)."""


@dataclass(frozen=True)
class EvaluateConfig(SamplingOptions, RewardOptions, Generating):
    """Evaluates a model on files of problems, with several samples of each: rewards, pass@k,
    majority votes, and how certain these numbers are.

        python -m pat_jax.evaluate --model Qwen/Qwen2.5-0.5B-Instruct \\
            --data examples/problems.jsonl --num_generations 8

    It can also evaluate a reward model on preference pairs.

        python -m pat_jax.evaluate --reward_model Skywork/Skywork-Reward-V2-Qwen3-0.6B \\
            --data examples/pairs.jsonl
    """

    model: str = ""
    """A Hugging Face checkpoint directory, such as a run's export, or a model of the Hugging Face
    Hub (owner/name). With --run_dir, the default is the model that the run began with."""
    run_dir: str = ""
    """Folder of a run of `python -m pat_jax.train` or `pat_jax.sft`. The policy in the run's
    checkpoint is evaluated. Nothing in the folder is changed, and the run may still be going on."""
    checkpoint: int | None = option(None, STEPS)
    """Step of the checkpoint of --run_dir to evaluate. Default: the newest complete checkpoint."""
    out: str = ""
    """Folder for results.json and completions.jsonl. If it is empty: evaluations/<date-time>."""
    resume: bool = False
    """Continue the interrupted evaluation in --out, with the options that it was started with. Its
    responses are kept, and all responses are scored again."""
    num_prompts: int = option(0, COUNT_OR_ZERO)
    """Number of problems from each file, always the same ones; 0 takes all."""
    num_generations: int = option(1, RESPONSES)
    """Number of samples for each problem."""
    pass_at: tuple[int, ...] = ()
    """Values of k for which pass@k is reported, each at most --num_generations. If none is given:
    1, 2, 4, 8 … and --num_generations."""
    max_prompt_length: int = auto(TOKENS)
    """Maximum prompt length in tokens. Problems with longer prompts are left out and counted. auto:
    1,024, or half of the model's context if that is less."""
    max_completion_length: int = auto(TOKENS)
    """Maximum response length in tokens; longer responses are cut. auto: 2,048, or what the prompt
    leaves of the context if that is less."""
    batch: int = option(64, RESPONSES)
    compute_dtype: ComputeDtype = "auto"
    """Data type of weights and arithmetic. auto: with --run_dir the run's data type, else bfloat16
    on GPUs and TPUs, and float32 on CPUs."""
    num_completions_to_print: int = option(0, COUNT_OR_ZERO)
    """Number of responses that are printed at the end."""
    data: DataConfig = field(default_factory=partial(DataConfig, files=()))
    reward_model: EvaluatedRewardModel = field(default_factory=EvaluatedRewardModel)

    def __post_init__(self):
        super().__post_init__()
        self.need("data.files", all(self.data.files), GIVEN[1])
        has_run = self.run_dir != ""
        run = "with it the run that it is of, in --run_dir"
        self.need("checkpoint", has_run or self.checkpoint is None, run)
        alone = "none with --run_dir, whose checkpoint says which adapters it has"
        self.need("adapter", not has_run or not self.adapter, alone)
        self.need("out", not self.resume or self.out != "", "with --resume the folder to go on in")
        check_samples_differ(self.num_generations, self.temperature)
        self._check_pass_at()
        if self.reward_model.model:
            self.need_only(_OF_PAIRS, "with --reward_model, which scores pairs and samples nothing")
            self.need_defaults(["data.answer_key"], "with --reward_model: pairs have no answers")

    def _check_pass_at(self) -> None:
        n = self.num_generations
        self.need(
            "pass_at",
            all(1 <= k <= n for k in self.pass_at),
            f"integers from 1 to --num_generations ({n}): pass@k is estimated from at least k samples",
        )
        self.need(
            "top_k",
            n == 1 or self.top_k != 1,
            f"0 or at least 2 with --num_generations {n}: greedy samples are all the same",
        )

    @property
    def has_reward_model(self) -> bool:
        return self.reward_model.model != "" or super().has_reward_model

    @property
    def ks(self) -> list[int]:
        """The values of k for pass@k, in ascending order."""
        n = self.num_generations
        powers = [1 << i for i in range(n.bit_length())]
        return sorted({*(self.pass_at or (*powers, n))})

    def check_given(self) -> None:
        """Raises UserError if no model is given, or no files to evaluate it on."""
        scored = self.reward_model.model
        model = self.model or self.run_dir or scored
        for name, value, what in (
            ("model", model, "a Hugging Face checkpoint directory"),
            ("data", self.data.files, f"files of {'preference pairs' if scored else 'problems'}"),
        ):
            if not value:
                other = ", or --run_dir with the folder of a run" if name == "model" else ""
                raise UserError(f"option --{name} is not given: expected {what}; add it{other}.")

    @property
    def model_options(self) -> RunConfig:
        """The options of a run that describe the model."""
        return self.model_of(self.data, self.run_dir)

    def run_config(self, model: ModelConfig, num_devices: int) -> RunConfig:
        """The options as those of a run, which evaluates in the same way. Raises UserError if
        prompt and response do not fit the model's context."""
        context = model.max_position
        prompt = self.max_prompt_length or min(1024, context // 2)
        response = self.max_completion_length or min(2048, max(context - prompt, 1))
        lengths = {"max_prompt_length": prompt, "max_completion_length": response}
        check_context(lengths, context, self.model)
        expected = f"at most the {model.vocab_size:,} tokens there are"
        self.need("top_k", self.top_k <= model.vocab_size, expected)
        both = prompt, response
        engine = self.engine_of(
            self.model_options, num_devices, self.batch, both, top_p=self.top_p, top_k=self.top_k
        )
        of_eval = EvalConfig(
            every=1,
            data=self.data.files,
            num_prompts=self.num_prompts or MOST_RESPONSES,
            num_generations=self.num_generations,
            temperature=self.temperature,
        )
        return replace(engine, eval=of_eval, **self.shared(RewardOptions))
