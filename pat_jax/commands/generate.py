"""The command `generate`: builds an engine, and completes prompts."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pat_jax.batch_generation.config import GenerateConfig, Reach
from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.prompt_lines import LineRequest, parse_ask, reach
from pat_jax.batch_generation.prompts import PromptFile, Prompts
from pat_jax.batch_generation.result_file import ResultFile
from pat_jax.batch_generation.text_session import TextSession
from pat_jax.common.devices import configure
from pat_jax.common.errors import UserError
from pat_jax.common.hosts.join import join
from pat_jax.common.hub import local_checkpoint
from pat_jax.common.json_text import read_json_object
from pat_jax.config.by_model import settled_dtype
from pat_jax.config.run import RunConfig
from pat_jax.config.shared import ChatOptions
from pat_jax.rl.text.tokenizer import Chat, Tokenizer
from pat_jax.run.files.hub_names import go_on_with_names
from pat_jax.run.results.saved_run import SavedRun
from pat_jax.run.results.session import SessionSetup
from pat_jax.run.roles.saved_policy import find_policy
from pat_jax.run.start.setup import model_config
from pat_jax.run.start.task import load_tokenizer, note_of

log = logging.getLogger(__name__)
GENERATION_CONFIG = "generation_config.json"


def generate(
    config: GenerateConfig,
    given: Prompts | None = None,
    saved_run: SavedRun | None = None,
    tell: Callable[[str], None] = log.info,
) -> ResultFile:
    """Completes prompts: `given`, or those of the file --prompts.

    Args:
      saved_run: the run whose policy generates; None: --model does.
      tell: called with sentences for the user.
    """
    join(config.distributed)
    prompts = given or PromptFile(Path(config.prompts))
    if next(iter(prompts), None) is None:
        raise UserError(
            f"option --prompts is {config.prompts!r}: the file has no line, expected one JSON object a "
            "line."
        )
    parts = prepared(config, saved_run, prompts)
    with ResultFile(Path(config.out) if config.out else None, resume=config.resume) as results:
        tell(parts.setup.engine.drafting)
        session = parts.open()
        tell(session.job(prompts, results).run())
        engine = session.session
        if parts.setup.engine.specs.drafts.num_draft_tokens and engine.report.bursts:
            tell(engine.drafts.words)
    return results


@dataclass(frozen=True)
class Prepared:
    """The parts of a session, before anything is compiled."""

    config: GenerateConfig
    setup: SessionSetup
    tokenizer: Tokenizer | None
    recommended: SamplingOverrides

    def open(self) -> TextSession:
        config = self.config
        session = self.setup.open(max_length=config.max_length)
        return TextSession(session, self.tokenizer, config.overrides, self.recommended, config.seed)


def prepared(
    config: GenerateConfig, saved_run: SavedRun | None = None, prompts: Prompts | None = None
) -> Prepared:
    """Builds the parts of a session for the policy of `saved_run`, or else of --model. The engine
    is sized for `prompts`, or else for all prompts that the options allow. Raises
    UserError if anything in the options or their files cannot work."""
    options = config.model_options
    if saved_run:
        go_on_with_names(saved_run.folder)
        own = saved_run.config
        if config.compute_dtype == "auto":
            config = replace(config, compute_dtype=own.compute_dtype)
        chat = own.data.shared(ChatOptions)
        data = own.data if isinstance(own, RunConfig) else replace(options.data, **chat)
        options = replace(options, data=data)
    folder = Path(local_checkpoint(config.model, weights=False))
    recommended = recommended_overrides(folder)
    devices = configure(config.devices)
    model = model_config(options.task, options.layout_choice, devices)
    platform = devices[0].platform
    dtype = settled_dtype(config.compute_dtype, platform, is_checkpoint=folder.is_dir())
    config = replace(config, compute_dtype=dtype)
    tokenizer = None
    if folder.is_dir() or saved_run:
        tokenizer = load_tokenizer(options.task)
        if note := note_of(tokenizer):
            log.warning("%s", note)
    elif config.chat != Chat():
        raise UserError(
            f"model {config.model!r} has no tokenizer: expected neither --system_prompt nor "
            "--chat_template_kwargs; leave them out, or give a checkpoint directory."
        )
    most = Reach(config.batch, min(config.max_length, model.max_position))
    asked = None
    if prompts is not None:
        asked = _asked(config, prompts, recommended, tokenizer, most)
    run = replace(config.run_config(model, len(devices), asked), data=options.data)
    saved = find_policy(str(saved_run.folder), None) if saved_run else None
    if saved:
        saved.check(model)
    setup = SessionSetup.of(
        run.engine,
        run.task,
        model,
        devices,
        saved,
        profile=run.profile,
        adapter=config.adapter,
    )
    if setup.headless:
        log.warning("%s", setup.headless)
    return Prepared(config, setup, tokenizer, recommended)


def _asked(
    config: GenerateConfig,
    prompts: Prompts,
    recommended: SamplingOverrides,
    tokenizer: Tokenizer | None,
    most: Reach,
) -> Reach:
    """Returns the numbers that size an engine for the prompts, none above those of `most`."""

    def parse(given: Mapping[str, Any]) -> LineRequest:
        return parse_ask(given, config.overrides, recommended, tokenizer, max_length=most.length)

    return reach(prompts, parse, most)


def recommended_overrides(directory: Path) -> SamplingOverrides:
    """Returns the sampling options of a checkpoint's `generation_config.json`, if it exists;
    `do_sample: false` becomes greedy sampling. Raises UserError if the file is invalid."""
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
