"""Options of `python -m pat_jax.generate`, and how they become those of a run."""

import math
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.rules import (
    COUNT_OR_ZERO,
    DEVICES,
    GIVEN,
    LAYOUT,
    RESPONSES,
    SEED,
    TOKENS,
    OptionError,
    check,
    count,
    matches,
)
from pat_jax.config.data import JSON_OBJECT, WHOLE_TEXT, DataConfig
from pat_jax.config.rollout import ComputeDtype
from pat_jax.config.run import AlgorithmConfig, RolloutConfig, RunConfig
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.models.config import ModelConfig
from pat_jax.rl.tokenizer import Chat

# Options of another name than their field in a line, which goes by the word of OpenAI and vLLM.
_OPTIONS = {
    "max_tokens": "max_completion_length",
    "min_tokens": "min_completion_length",
    "n": "num_generations",
}
SHORTEST_CACHE = 256  # tokens; fewer and longer buckets compile sooner


class Reach(NamedTuple):
    """How large an engine has to be."""

    rows: int  # samples that can run at once
    length: int  # tokens of the longest prompt and response


@dataclass(frozen=True)
class GenerateConfig:
    """Completes a file of prompts, one JSON line each. How to sample: a line's own fields win over
    these options, which win over the checkpoint's generation_config.json.

        python -m pat_jax.generate --model Qwen/Qwen2.5-0.5B-Instruct \\
            --prompts examples/prompts.jsonl --out results.jsonl
    """

    model: str = "demo"
    """A Hugging Face checkpoint directory, a model of the Hugging Face Hub (owner/name), or the name of
    a built-in shape with random weights (and no tokenizer: token ids only)."""
    adapter: str = ""
    """A PEFT adapter directory, or one of the Hugging Face Hub (owner/name); the adapters are merged into the weights of --model."""
    prompts: str = "prompts.jsonl"
    """JSON lines, each with one of prompt (a text to continue), messages (a chat) or token_ids, and if
    need be id, metadata, tools, stop_token_ids and any of the sampling options."""
    out: str = "results.jsonl"
    """Where the results go, one JSON line for each sample, in the order of the prompts."""
    resume: bool = False
    """Go on after the results that are in --out already."""
    system_prompt: str = ""
    """System message of chats that have none."""
    chat_template_kwargs: str = ""
    """Variables of the chat template, a JSON object such as '{"enable_thinking": false}'; a line's
    own win."""
    temperature: float | None = None
    """Softmax temperature; 0 is greedy. 1 unless given."""
    top_k: int | None = None
    """Sample among the k likeliest tokens; 0 turns it off."""
    top_p: float | None = None
    """Sample among the fewest likeliest tokens with at least this mass; 1 turns it off."""
    min_p: float | None = None
    """Sample among tokens with at least this part of the likeliest one's probability."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens in prompt or response (multiplies negative ones); 1 is off."""
    presence_penalty: float | None = None
    """Taken off the logits of tokens in the response."""
    min_completion_length: int | None = None
    """Nothing ends a response before it has so many tokens; `min_tokens` in a line."""
    max_completion_length: int | None = None
    """Longest response in tokens, `max_tokens` in a line; unless given, what --max_length leaves.
    What generation_config.json recommends is cut to that."""
    stop: str | None = None
    """A text that ends a response, itself left out; lines may have a list of them."""
    logprobs: int | None = None
    """Report log-probabilities: of each token drawn, and of so many likeliest tokens by the model
    alone."""
    num_generations: int | None = None
    """Samples of each prompt; `n` in a line."""
    seed: int = 0
    """Seed of sampling and of random weights. A line's own seed makes its samples independent of its
    place in the file."""
    batch: int = 32
    """Sequences generated at once (rounded up to a multiple of the devices)."""
    max_length: int = 2048
    """Longest prompt and response together in tokens, at most the model's context."""
    max_logprobs: int = 5
    """How many of the likeliest tokens a line may ask for, where --logprobs does not ask for more."""
    layout: str = "auto"
    """auto plans the layout of every moment; `dp2tp4` pins one."""
    profile: str = "auto"
    """What the planner plans by: see `python -m pat_jax.train --help`."""
    devices: int = 0
    """Devices to use, of all processes together; 0 takes all (on CPU the largest power of two up
    to min(cores, 8) in each process)."""
    compute_dtype: ComputeDtype = "auto"
    """Weights and arithmetic. auto: bfloat16 for a checkpoint directory or a model of the Hub on GPUs and
    TPUs, else float32."""
    weights: Literal["auto", "int8", "fp8"] = "auto"
    """auto keeps the weights in compute_dtype; int8 and fp8 (e4m3) quantize those of linear layers,
    with a scale for each output: a half or a quarter of the memory, and another model by a little."""
    gap_tokens: int = 4096
    """Of quantized weights, at the end: tokens, the first ones generated, whose log-probabilities are
    set beside those by the full weights, which are loaded for it; 0 leaves that out."""
    debug_nans: bool = False
    """Name the layer where the logits of a failed request cease to be numbers."""
    # Results are written in the order of the file: after a kill only those count that all before have.
    speculation: SpeculationConfig = field(
        default_factory=partial(SpeculationConfig, stagger="off")
    )
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self):
        check(self, "model prompts out profile", GIVEN)
        check(self, "max_logprobs gap_tokens", COUNT_OR_ZERO)
        check(self, "chat_template_kwargs", JSON_OBJECT)
        check(self, "system_prompt", WHOLE_TEXT)
        check(self, "seed", SEED)
        check(self, "devices", DEVICES)
        check(self, "batch", RESPONSES)
        check(self, "max_length", count(2, 2**24))
        check(self, "layout", matches(f"auto|{LAYOUT}", "auto or a layout such as dp4tp2"))
        if self.num_generations is not None:
            check(self, "num_generations", RESPONSES)
        if self.max_completion_length is not None:
            check(self, "max_completion_length", TOKENS)
        try:
            self.overrides.check()
        except ValueError as error:
            field, _, problem = str(error).partition(" ")
            name, expected = _OPTIONS.get(field, field), problem.partition(": expected ")[2]
            raise OptionError(name, getattr(self, name), expected.removesuffix(".")) from None

    @property
    def chat(self) -> Chat:
        return self.model_options.data.chat

    @property
    def overrides(self) -> SamplingOverrides:
        """The sampling options."""
        names = [field.name for field in fields(SamplingOverrides)]
        ours = {name: getattr(self, _OPTIONS.get(name, name), None) for name in names}
        return SamplingOverrides(**(ours | {"seed": None}))  # the command's own is another stream

    def run_config(
        self, model: ModelConfig, num_devices: int, reach: Reach | None = None
    ) -> RunConfig:
        """The options under the names that the engine is built by.

        Args:
          reach: what is asked for at most; None: as much as the options allow.

        Raises:
          UserError: more log-probabilities are asked for than the model has tokens.
        """
        vocab = (
            lambda x: (x or 0) <= model.vocab_size,
            f"at most the {model.vocab_size:,} tokens of the model",
        )
        check(self, "top_k logprobs max_logprobs", vocab)
        rows, length = reach or Reach(self.batch, min(self.max_length, model.max_position))
        batch, page = math.ceil(rows / num_devices) * num_devices, RolloutConfig.page_size
        rollout = RolloutConfig(
            prompts_per_step=batch,
            num_generations=1,
            max_prompt_length=length // 2,
            max_completion_length=length - length // 2,
            max_logprobs=max(self.max_logprobs, self.logprobs or 0),
            weights=self.weights,
            min_length=math.ceil(min(SHORTEST_CACHE, length) / page) * page,
        )
        return replace(
            self.model_options,
            profile=self.profile,
            speculation=self.speculation,
            rollout=rollout,
            algorithm=AlgorithmConfig(mini_batch_size=batch),
        )

    @property
    def model_options(self) -> RunConfig:
        return RunConfig(
            model=self.model,
            layout=self.layout,
            train=False,
            # Absolute: a file may have the name of a built-in task, which brings its own vocabulary.
            data=DataConfig(
                (str(Path(self.prompts).absolute()),),
                system_prompt=self.system_prompt,
                chat_template_kwargs=self.chat_template_kwargs,
            ),
            seed=self.seed,
            compute_dtype=self.compute_dtype,
        )
