"""`python -m pat_jax.generate`: completions of a file of prompts, one JSON line each.

Reads and writes line by line. A line that is wrong gets its error as its result, the others go on;
a killed run goes on with --resume where it was.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
from tqdm import tqdm

from pat_jax.cli import parse, run_command
from pat_jax.config import AlgorithmConfig, RolloutConfig, RunConfig
from pat_jax.devices import configure
from pat_jax.engine.layout import Layout
from pat_jax.engine.rollout import RolloutEngine
from pat_jax.engine.session import Session
from pat_jax.errors import UserError
from pat_jax.gap import NoRoom, Sample, measure_gap
from pat_jax.job import Job
from pat_jax.memory import engine_memory, memory_limit
from pat_jax.models.config import ModelConfig
from pat_jax.models.hf_config import read_json_object
from pat_jax.models.hf_load import load_params
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.lengths import LengthModel
from pat_jax.planning.planner import CostModelPlanner, Planner
from pat_jax.planning.profile import Profile
from pat_jax.planning.scripts import FixedLayout
from pat_jax.profiling.measure import Warmup
from pat_jax.prompt_lines import Wishes, read_lines
from pat_jax.result_file import ResultFile
from pat_jax.rl.tokenizer import HuggingFaceTokenizer, check_vocabulary
from pat_jax.rules import COUNT, COUNT_OR_ZERO, GIVEN, LAYOUT, check, matches
from pat_jax.setup import build_engine, find_profile, model_config, profile_subject

GENERATION_CONFIG = "generation_config.json"
SHORTEST_CACHE = 256  # tokens; fewer and longer buckets compile sooner


@dataclass(frozen=True)
class GenerateConfig:
    """Completions of a file of prompts. How to sample: a line's own fields win over these options,
    which win over the checkpoint's generation_config.json."""

    model: str = "demo"
    """A Hugging Face checkpoint directory, or the name of a built-in shape with random weights (and
    no tokenizer: token ids only)."""
    prompts: str = "prompts.jsonl"
    """JSON lines, each with one of prompt (text that is gone on with), messages (a chat) or
    token_ids, and if need be id, metadata, stop_token_ids and any of the sampling options."""
    out: str = "results.jsonl"
    """Where the results go, one JSON line for each sample, in the order of the prompts."""
    resume: bool = False
    """Go on after the results that are in --out already."""
    temperature: float | None = None
    """Softmax temperature; 0 is greedy. 1 where nobody says otherwise."""
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
    min_tokens: int | None = None
    """Nothing ends a response before it has so many tokens."""
    max_tokens: int | None = None
    """Longest response in tokens; what --max_length leaves where nobody says otherwise. What
    generation_config.json recommends is cut to that."""
    stop: str | None = None
    """A text that ends a response, itself left out; lines may have a list of them."""
    logprobs: int | None = None
    """Report log-probabilities: of each token drawn, and of so many likeliest tokens by the model
    alone."""
    n: int | None = None
    """Samples of each prompt."""
    seed: int = 0
    """Seed of sampling and of random weights. A line's own seed makes its samples independent of its
    place in the file."""
    batch: int = 32
    """Sequences generated at once (rounded up to a multiple of the devices)."""
    max_length: int = 2048
    """Longest prompt and response together in tokens, at most the model's context."""
    max_logprobs: int = 5
    """Most likeliest tokens that a line may ask for, if --logprobs does not ask for more."""
    layout: str = "auto"
    """auto plans the layout of every moment; `dp2tp4` pins one."""
    profile: str = "auto"
    """What the planner plans by: see `python -m pat_jax.train --help`."""
    devices: int = 0
    """Devices to use; 0 takes all (on CPU the largest power of two up to min(cores, 8))."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and arithmetic."""
    weights: Literal["auto", "int8", "fp8"] = "auto"
    """auto keeps the weights in compute_dtype; int8 and fp8 (e4m3) quantize those of linear layers,
    with a scale for each output: a half or a quarter of the memory, and another model by a little."""
    gap_tokens: int = 4096
    """Of quantized weights, at the end: tokens, the first ones generated, whose log-probabilities are
    set beside those by the full weights, which are loaded for it; 0 leaves that out."""
    debug_nans: bool = False
    """Name the layer where the logits of a failed request cease to be numbers."""

    def __post_init__(self):
        check(self, "model prompts out profile", GIVEN)
        check(self, "seed devices max_logprobs gap_tokens", COUNT_OR_ZERO)
        check(self, "batch", COUNT)
        check(self, "max_length", (lambda x: x >= 2, "an integer of at least 2"))
        check(self, "layout", matches(f"auto|{LAYOUT}", "auto or a layout such as dp4tp2"))

    @property
    def wishes(self) -> Wishes:
        """The sampling options; UserError where one cannot be."""
        names = {field.name for field in fields(self)} - {"seed"}
        named = [field.name for field in fields(Wishes) if field.name in names]
        return _sound(Wishes(**{name: getattr(self, name) for name in named}), "option")

    def run_config(self, model: ModelConfig, num_devices: int) -> RunConfig:
        """The options under the names that the engine is built by.

        Raises:
          UserError: more log-probabilities are asked for than the model has tokens.
        """
        vocab = (
            lambda x: (x or 0) <= model.vocab_size,
            f"at most the {model.vocab_size} tokens of the model",
        )
        check(self, "logprobs max_logprobs", vocab)
        length = min(self.max_length, model.max_position)
        batch, page = math.ceil(self.batch / num_devices) * num_devices, RolloutConfig.page_size
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
            layout=self.layout,
            profile=self.profile,
            rollout=rollout,
            algorithm=AlgorithmConfig(mini_batch_size=batch),
        )

    @property
    def model_options(self) -> RunConfig:
        return RunConfig(
            model=self.model,
            # Absolute: a file may have the name of a built-in task, which brings its own vocabulary.
            data=str(Path(self.prompts).absolute()),
            seed=self.seed,
            compute_dtype=self.compute_dtype,
        )


def main() -> None:
    config = parse(sys.argv[1:], GenerateConfig, prog="python -m pat_jax.generate", presets=None)
    next(read_lines(Path(config.prompts)), None)  # refuses a file that cannot be read
    wishes, recommended = config.wishes, checkpoint_wishes(Path(config.model))
    devices = configure(config.devices)
    model = model_config(config.model_options, len(devices))
    tokenizer = None
    if Path(config.model).is_dir():
        tokenizer = HuggingFaceTokenizer(config.model)
        check_vocabulary(tokenizer, model.vocab_size, source=config.model)
    run = config.run_config(model, len(devices))
    engine = build_engine(run, model, devices)
    profile = find_profile(run, profile_subject(run, model, devices))
    with ResultFile(Path(config.out), resume=config.resume) as results:
        session = open_session(config, run, engine, profile)
        prompts, sample = Path(config.prompts), Sample(config.gap_tokens)
        job = Job(prompts, config.seed, session, tokenizer, wishes, recommended, results)
        job.run(sample.add)
    if config.weights != "auto" and sample.sequences:
        print(gap_words(config, run, engine, sample), file=sys.stderr)


def checkpoint_wishes(directory: Path) -> Wishes:
    """What a checkpoint's authors recommend, if they do. `do_sample: false` is greedy.

    Raises:
      UserError: the file is no JSON object, or has a value that cannot be.
    """
    path = directory / GENERATION_CONFIG
    if not path.is_file():
        return Wishes()
    found = read_json_object(path)
    same = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: found.get(name) for name in same}
    if found.get("do_sample") is False:
        values["temperature"] = 0.0
    limits = {"max_tokens": found.get("max_new_tokens"), "min_tokens": found.get("min_new_tokens")}
    return _sound(Wishes(**values, **limits), str(path))


def _sound(wishes: Wishes, where: str) -> Wishes:
    try:
        _ = wishes.sampling, wishes.stops, wishes.count("n", 1, 1), wishes.count("max_tokens", 1, 1)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return wishes


def gap_words(config: GenerateConfig, run: RunConfig, engine: RolloutEngine, sample: Sample) -> str:
    """How far the results are from those of the full weights, which the engine's make room for."""
    limit = memory_limit(run.rollout, list(engine.mesh.devices.flat))
    gap = measure_gap(engine, sample, partial(load_weights, config, engine.dtype), limit=limit)
    against = f"{config.weights} weights against {config.compute_dtype}"
    if isinstance(gap, NoRoom):
        return f"{against}: not compared, because {gap}"
    return (
        f"{against}: log-probabilities of {sample.num_tokens:,} tokens of {len(sample.sequences)} "
        f"responses differ by {gap.mean:.3g} nats in the mean, {gap.largest:.3g} at most"
    )


def load_weights(
    config: GenerateConfig, dtype: jnp.dtype, policy: Policy, layout: Layout
) -> Params:
    """As `policy` keeps them: from the checkpoint, or random ones."""
    shardings = layout.param_shardings(policy)
    if Path(config.model).is_dir():
        return load_params(config.model, policy, shardings, dtype)
    return policy.init(config.seed, shardings, dtype)


def open_session(
    config: GenerateConfig, run: RunConfig, engine: RolloutEngine, profile: Profile | None
) -> Session:
    """Everything compiled, the weights in place."""
    weights_in = partial(load_weights, config, engine.dtype, engine.policy)
    with tqdm(total=0, unit="program", desc="compiling", disable=None, dynamic_ncols=True) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        engine.compile(show)
    planner = _planner(run, engine, profile, weights_in)
    first = next(iter(engine.layouts.values()))
    engine.set_weights(weights_in(first), first)
    return Session(engine, planner, max_length=config.max_length, debug_nans=config.debug_nans)


def _planner(
    run: RunConfig,
    engine: RolloutEngine,
    profile: Profile | None,
    weights_in: Callable[[Layout], Params],
) -> Planner:
    first, *others = engine.layouts
    if first.dp == 1 and not others:
        return FixedLayout(first)  # nothing to choose, no groups to keep even
    memory = engine_memory(engine, run.rollout)
    warmup = Warmup(engine, known=profile and profile.latency, recheck=True)
    latency, buckets = warmup.measure(weights_in), engine.catalogue.buckets
    return CostModelPlanner(
        tuple(engine.layouts),
        latency.on(buckets.rows, buckets.lengths),
        LengthModel.empty(buckets.lengths[-1]),
        memory=memory,
    )


if __name__ == "__main__":
    run_command(main)
