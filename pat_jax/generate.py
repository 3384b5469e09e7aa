"""`python -m pat_jax.generate`: completions of a file of prompts, one JSON line each.

Reads and writes line by line. A line that is wrong gets its error as its result, the others go on;
a killed run goes on with --resume where it was.
"""

import sys
from functools import partial
from pathlib import Path

from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.batch_generation.job import BatchJob
from pat_jax.batch_generation.prompt_lines import SamplingOverrides, read_lines
from pat_jax.batch_generation.result_file import ResultFile
from pat_jax.batch_generation.weight_gap import NoRoom, Sample, measure_gap
from pat_jax.common.devices import configure
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse, run_command
from pat_jax.config.run import RunConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.memory import memory_limit
from pat_jax.models.hf_config import read_json_object
from pat_jax.rl.tokenizer import Chat, HuggingFaceTokenizer
from pat_jax.run.session import load_weights, open_session
from pat_jax.run.setup import build_engine, find_profile, model_config, profile_subject

GENERATION_CONFIG = "generation_config.json"


def main() -> None:
    config = parse(sys.argv[1:], GenerateConfig, prog="python -m pat_jax.generate", presets=None)
    if next(read_lines(Path(config.prompts)), None) is None:
        raise UserError(
            f"option --prompts is {config.prompts!r}: the file has no line, expected one JSON object a "
            "line."
        )
    overrides, recommended = config.overrides, recommended_overrides(Path(config.model))
    devices = configure(config.devices)
    model = model_config(config.model_options, len(devices))
    tokenizer = None
    if Path(config.model).is_dir():
        tokenizer = HuggingFaceTokenizer(config.model, config.chat)
    elif config.chat != Chat():
        raise UserError(
            f"model {config.model!r} has no tokenizer: expected neither --system_prompt nor "
            "--chat_template_kwargs; leave them out, or give a checkpoint directory."
        )
    run = config.run_config(model, len(devices))
    engine = build_engine(run, model, devices)
    profile = find_profile(run, profile_subject(run, model, devices))
    with ResultFile(Path(config.out), resume=config.resume) as results:
        weights_in = partial(load_weights, run, engine.dtype, engine.policy)
        session = open_session(
            run,
            engine,
            profile,
            weights_in,
            max_length=config.max_length,
            debug_nans=config.debug_nans,
        )
        prompts, sample = Path(config.prompts), Sample(config.gap_tokens)
        job = BatchJob(prompts, config.seed, session, tokenizer, overrides, recommended, results)
        job.run(sample.add)
    if config.weights != "auto" and sample.sequences:
        print(gap_words(config, run, engine, sample), file=sys.stderr)


def recommended_overrides(directory: Path) -> SamplingOverrides:
    """The sampling that a checkpoint's authors recommend, if any. `do_sample: false` is greedy.

    Raises:
      UserError: the file is no JSON object, or has a value that cannot be.
    """
    path = directory / GENERATION_CONFIG
    if not path.is_file():
        return SamplingOverrides()
    found = read_json_object(path)
    same = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    values = {name: found.get(name) for name in same}
    if found.get("do_sample") is False:
        values["temperature"] = 0.0
    limits = {"max_tokens": found.get("max_new_tokens"), "min_tokens": found.get("min_new_tokens")}
    overrides = SamplingOverrides(**values, **limits)
    try:
        overrides.check()
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return overrides


def gap_words(config: GenerateConfig, run: RunConfig, engine: RolloutEngine, sample: Sample) -> str:
    """How far the results are from those of the full weights; the engine's weights are freed for them."""
    limit = memory_limit(run.rollout, list(engine.mesh.devices.flat))
    gap = measure_gap(engine, sample, partial(load_weights, run, engine.dtype), limit=limit)
    against = f"{config.weights} weights against {config.compute_dtype}"
    if isinstance(gap, NoRoom):
        return f"{against}: not compared, because {gap}"
    return (
        f"{against}: log-probabilities of {sample.num_tokens:,} tokens of {len(sample.sequences)} "
        f"responses differ by {gap.mean:.3g} nats in the mean, {gap.largest:.3g} at most"
    )


if __name__ == "__main__":
    run_command(main)
