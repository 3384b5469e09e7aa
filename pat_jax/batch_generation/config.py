"""Options of `python -m pat_jax.generate`, and the `RunConfig` made of them."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.common.options.declared import option
from pat_jax.common.rules import (
    COUNT_OR_ZERO,
    GIVEN,
    RESPONSES,
    SEED,
    TOKENS,
    OptionError,
    count,
)
from pat_jax.config.data import DataConfig
from pat_jax.config.generating import Generating
from pat_jax.config.run import RunConfig
from pat_jax.config.shared import ChatOptions, ComputeDtype
from pat_jax.models.config import ModelConfig
from pat_jax.rl.text.tokenizer import Chat

# Fields of a line, named as in OpenAI and vLLM, whose option has another name.
_OPTIONS = {
    "max_tokens": "max_completion_length",
    "min_tokens": "min_completion_length",
    "n": "num_generations",
}


class Reach(NamedTuple):
    """The size that an engine needs."""

    rows: int  # responses that can be generated at once
    length: int  # tokens of the longest prompt and response together


@dataclass(frozen=True)
class GenerateConfig(ChatOptions, Generating):
    """Generates responses to a file of prompts, one JSON line each. Sampling options in a line win
    over the options below, which win over the checkpoint's generation_config.json.

        python -m pat_jax.generate --model Qwen/Qwen2.5-0.5B-Instruct \\
            --prompts examples/prompts.jsonl --out results.jsonl
    """

    model: str = option("demo", GIVEN)
    """A Hugging Face checkpoint directory, a model of the Hugging Face Hub (owner/name), or a
    built-in shape (--help model). A shape has random weights and no tokenizer, so it takes token
    ids only."""
    prompts: str = option("prompts.jsonl", GIVEN)
    """File of JSON lines, each with one of prompt (a text to continue), messages (a chat) or
    token_ids. A line may also have id, metadata, tools, stop_token_ids and any of the sampling
    options."""
    out: str = ""
    """Path of the results, one JSON line for each sample, in the order of the prompts. If it is
    empty: results.jsonl, or no file if called from Python."""
    resume: bool = False
    """Keep the results that are already in --out, and continue after them."""
    temperature: float | None = None
    """Softmax temperature of sampling; 0 is greedy. It is 1 if nothing sets it."""
    top_k: int | None = None
    """Sample among the top_k most likely tokens; 0 turns it off."""
    top_p: float | None = None
    """Sample among the fewest tokens whose probabilities add up to at least top_p; 1 turns it
    off."""
    min_p: float | None = None
    """Sample among tokens with at least min_p times the probability of the most likely token."""
    repetition_penalty: float | None = None
    """Divides the positive logits of tokens that are in the prompt or the response, and multiplies
    the negative ones; 1 turns it off."""
    presence_penalty: float | None = None
    """Number subtracted from the logits of tokens that are in the response already."""
    min_completion_length: int | None = None
    """Minimum response length in tokens (`min_tokens` in a line). No token or text ends a response
    before."""
    max_completion_length: int | None = option(None, TOKENS)
    """Maximum response length in tokens (`max_tokens` in a line). If it is not given, it is what
    the prompt leaves of --max_length; a value from generation_config.json is cut to that."""
    stop: str | None = None
    """A text that ends a response and is left out of it. A line may have a list of texts."""
    logprobs: int | None = None
    """Report the log-probability of each token, and this many most likely tokens at its position by
    the model's own probabilities, without sampling options."""
    num_generations: int | None = option(None, RESPONSES)
    """Number of samples for each prompt (`n` in a line)."""
    seed: int = option(0, SEED)
    """Random seed of sampling and of random weights. If a line has its own seed, its samples do not
    depend on its place in the file."""
    max_length: int = option(2048, count(2, 2**24))
    """Maximum tokens of a prompt and its response together; at most the model's context."""
    max_logprobs: int = option(5, COUNT_OR_ZERO)
    """Maximum value of `logprobs` in a line, unless --logprobs is larger."""
    compute_dtype: ComputeDtype = "auto"
    """Data type of weights and arithmetic. auto: bfloat16 for a checkpoint directory or a model of
    the Hub on GPUs and TPUs, else float32."""

    def __post_init__(self):
        super().__post_init__()
        try:
            self.overrides.check()
        except ValueError as error:
            field, _, problem = str(error).partition(" ")
            name = _OPTIONS.get(field, field)
            expected = problem.partition(": expected ")[2]
            raise OptionError(name, getattr(self, name), expected.removesuffix(".")) from None

    @property
    def chat(self) -> Chat:
        return Chat(self.system_prompt, self.template_variables)

    @property
    def overrides(self) -> SamplingOverrides:
        """The sampling options, by the names that prompt lines use."""
        names = [field.name for field in fields(SamplingOverrides)]
        ours = {name: getattr(self, _OPTIONS.get(name, name), None) for name in names}
        return SamplingOverrides(**(ours | {"seed": None}))  # the command's own is another stream

    def run_config(
        self, model: ModelConfig, num_devices: int, reach: Reach | None = None
    ) -> RunConfig:
        """Returns the configuration that the engine is built from. `reach` is the most that the
        prompts ask for; by default the options alone size the engine. Raises UserError if top_k,
        logprobs or max_logprobs is larger than the model's vocabulary."""
        expected = f"at most the {model.vocab_size:,} tokens of the model"
        for name in ("top_k", "logprobs", "max_logprobs"):
            self.need(name, (getattr(self, name) or 0) <= model.vocab_size, expected)
        rows, length = reach or Reach(self.batch, min(self.max_length, model.max_position))
        return self.engine_of(
            self.model_options,
            num_devices,
            rows,
            (length // 2, length - length // 2),
            max_logprobs=max(self.max_logprobs, self.logprobs or 0),
        )

    @property
    def model_options(self) -> RunConfig:
        # Absolute: a file may have the name of a built-in task, which brings its own vocabulary.
        path = str(Path(self.prompts).absolute())
        return self.model_of(DataConfig(files=(path,), **self.shared(ChatOptions)))
