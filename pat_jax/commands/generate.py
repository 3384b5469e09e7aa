"""An engine to generate with, and a file of prompts that goes through it, once the options are read."""

import logging
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from pat_jax.batch_generation.config import GenerateConfig, Reach
from pat_jax.batch_generation.job import BatchJob
from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.prompt_lines import parse_ask, read_lines
from pat_jax.batch_generation.reach import reach
from pat_jax.batch_generation.result_file import ResultFile
from pat_jax.batch_generation.weight_gap import NoRoom, Sample, measure_gap
from pat_jax.common.devices import configure
from pat_jax.common.errors import UserError
from pat_jax.common.hosts.join import join
from pat_jax.common.hub import local_checkpoint
from pat_jax.config.by_model import settled_dtype
from pat_jax.config.run import RunConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.session import Session
from pat_jax.engine.sizing.device_memory import memory_limit
from pat_jax.models.checkpoints.hf_config import read_json_object
from pat_jax.models.policy import Policy
from pat_jax.planning.latency.profile import Profile, Subject
from pat_jax.rl.text.tokenizer import Chat, HuggingFaceTokenizer, Tokenizer
from pat_jax.run.checkpoints.exit_head_state import saved_head
from pat_jax.run.results.saved_policy import find_policy
from pat_jax.run.results.saved_run import SavedRun
from pat_jax.run.results.session import open_session
from pat_jax.run.results.weights import Load, weights_of_model, weights_of_run
from pat_jax.run.setup import build_engine, find_profile, model_config, profile_subject
from pat_jax.run.start.hub_names import go_on_with_names
from pat_jax.run.task import load_tokenizer

log = logging.getLogger(__name__)
GENERATION_CONFIG = "generation_config.json"


def generate(config: GenerateConfig) -> None:
    join(config.distributed)
    if next(read_lines(Path(config.prompts)), None) is None:
        raise UserError(
            f"option --prompts is {config.prompts!r}: the file has no line, expected one JSON object a "
            "line."
        )
    parts = prepared(config, prompts=Path(config.prompts))
    with ResultFile(Path(config.out), resume=config.resume) as results:
        print(parts.engine.drafting, file=sys.stderr)
        session, tokenizer = parts.open(), parts.tokenizer
        assert tokenizer is None or isinstance(tokenizer, HuggingFaceTokenizer)
        prompts, sample = Path(config.prompts), Sample(config.gap_tokens)
        sampling = config.overrides, parts.recommended
        job = BatchJob(prompts, config.seed, session, tokenizer, *sampling, results)
        job.run(sample.add)
        if parts.engine.specs.drafts.budgets and session.report.bursts:
            print(session.drafts.words, file=sys.stderr)
    if config.weights != "auto" and sample.sequences:
        print(gap_words(parts.config, parts.run, parts.engine, sample, parts.load), file=sys.stderr)


@dataclass(frozen=True)
class Prepared:
    """The parts of a session, nothing compiled yet."""

    config: GenerateConfig
    run: RunConfig
    engine: RolloutEngine
    subject: Subject
    profile: Profile | None
    load: Load
    tokenizer: Tokenizer | None
    recommended: SamplingOverrides
    exit_head: np.ndarray | None = None  # that a run has learned; see `RolloutEngine.set_weights`

    def open(self) -> Session:
        weights_in = partial(self.load, self.engine.dtype, self.engine.policy)
        most, nans = self.config.max_length, self.config.debug_nans
        made_of = self.run, self.engine, self.subject, self.profile, weights_in
        return open_session(*made_of, exit_head=self.exit_head, max_length=most, debug_nans=nans)


def prepared(
    config: GenerateConfig, saved_run: SavedRun | None = None, prompts: Path | None = None
) -> Prepared:
    """
    Args:
      saved_run: whose policy it is; None: it is that of --model.
      prompts: all that will be asked; None: anything that the options allow may be.

    Raises:
      UserError: whatever in the options or their files cannot work.
    """
    if saved_run:
        go_on_with_names(saved_run.folder)
    folder, options = Path(local_checkpoint(config.model, weights=False)), config.model_options
    recommended = recommended_overrides(folder)
    if saved_run:
        options = replace(options, data=saved_run.config.data)
    devices = configure(config.devices)
    model = model_config(options, devices)
    platform = devices[0].platform
    dtype = settled_dtype(config.compute_dtype, platform, is_checkpoint=folder.is_dir())
    config = replace(config, compute_dtype=dtype)
    tokenizer = None
    if folder.is_dir() or saved_run:
        tokenizer = load_tokenizer(options)
    elif config.chat != Chat():
        raise UserError(
            f"model {config.model!r} has no tokenizer: expected neither --system_prompt nor "
            "--chat_template_kwargs; leave them out, or give a checkpoint directory."
        )
    asked = None
    if prompts:
        most = Reach(config.batch, min(config.max_length, model.max_position))
        assert tokenizer is None or isinstance(tokenizer, HuggingFaceTokenizer)
        line = (config.overrides, recommended, tokenizer)
        asked = reach(prompts, lambda given: parse_ask(given, *line, max_length=most.length), most)
    run = replace(config.run_config(model, len(devices), asked), data=options.data)
    engine, head = build_engine(run, model, devices), None
    if not saved_run:
        load = weights_of_model(run, model, config.adapter)
    else:
        saved = find_policy(str(saved_run.folder), None)
        saved.check(model)
        layout = next(iter(engine.layouts.values()))
        load = weights_of_run(run, saved, Policy.from_config(model), layout)
        head, headless = saved_head(saved, engine)
        if headless:
            log.warning("%s", headless)
    subject = profile_subject(run, model, devices)
    profile = find_profile(run, subject)
    return Prepared(config, run, engine, subject, profile, load, tokenizer, recommended, head)


def recommended_overrides(directory: Path) -> SamplingOverrides:
    """The sampling that a checkpoint's authors recommend, if any. `do_sample: false` is greedy.

    Raises:
      UserError: the file does not hold a JSON object, or holds an impossible value.
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


def gap_words(
    config: GenerateConfig, run: RunConfig, engine: RolloutEngine, sample: Sample, load: Load
) -> str:
    """How far the results are from those of the full weights; the engine's weights are freed for them."""
    limit = memory_limit(run.rollout, list(engine.mesh.devices.flat))
    gap = measure_gap(engine, sample, partial(load, engine.dtype), limit=limit)
    against = f"{config.weights} weights against {config.compute_dtype}"
    if isinstance(gap, NoRoom):
        return f"{against}: not compared, because {gap}"
    return (
        f"{against}: log-probabilities of {sample.num_tokens:,} tokens of {len(sample.sequences)} "
        f"responses differ by {gap.mean:.3g} nats in the mean, {gap.largest:.3g} at most"
    )
