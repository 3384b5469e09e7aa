"""`python -m pat_jax.generate`: generates responses to a file of prompts, one JSON line each.

Reads and writes line by line. A wrong line gets its error as its result; other lines are not
affected. A killed run continues with --resume. From Python, use `pat_jax.generate(...)`, or
`pat_jax.session(...)`, which keeps the engine for further prompts.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.common.errors import UserError
from pat_jax.common.rules import OptionError
from pat_jax.common.run_command import in_one_sentence, offer
from pat_jax.config.command_line import parse
from pat_jax.config.from_python import Config, words
from pat_jax.run.process.in_process import in_program

if TYPE_CHECKING:
    from pat_jax.batch_generation.answers import Answer
    from pat_jax.batch_generation.prompts import PromptLike
    from pat_jax.batch_generation.text_session import TextSession
    from pat_jax.run.results.saved_run import SavedRun

OUT = "results.jsonl"
_OF_FILES = ("prompts", "out", "resume")
_NO_FILES = "none here: it belongs to files of prompts; give prompts to `generate`"
read = partial(parse, config_class=GenerateConfig, prog="python -m pat_jax.generate", presets=None)


def main() -> None:
    config = read(sys.argv[1:])
    from pat_jax.commands import generate as command  # and JAX, once the options are right

    to = replace(config, out=config.out or OUT)
    command.generate(to, tell=partial(print, file=sys.stderr))


def generate(
    prompts: "str | os.PathLike[str] | Iterable[PromptLike]",
    config: Config = None,
    *,
    run: "SavedRun | str | Path | None" = None,
    **options: Any,
) -> "list[Answer]":
    """Completes prompts, as `python -m pat_jax.generate` does.

        for answer in pat_jax.generate(["Once upon a time"], model=folder, temperature=0):
            print(answer.text, answer.finish_reason)

    Args:
      prompts: a list of texts to continue, chats (lists of messages), token ids, or dictionaries
        with the fields of a line of a prompts file; or the name of such a file.
      config: a YAML file, or a dictionary of options.
      run: a run of `train` or `sft` whose learned policy generates, instead of `model`.
      options: win over `config`, by the names that `python -m pat_jax.generate --help` lists. With
        `out` the results are written to that file, too.

    Returns:
      The answers in the order of the prompts, one for each sample: text, token ids, finish reason,
      log-probabilities if they are asked for, and the number of its prompt. The answer to a wrong
      prompt has an `error`; other prompts are not affected.

    Raises:
      UserError: one sentence about what is wrong.
      KeyboardInterrupt: it was interrupted; `resume=True` goes on with the file `out`.
    """
    from pat_jax.batch_generation.answers import Answer
    from pat_jax.batch_generation.prompts import GivenPrompts
    from pat_jax.commands import generate as command

    with in_program():
        saved, asked = _of_run(run, options)
        given = None
        if isinstance(prompts, str | os.PathLike):
            asked["prompts"] = prompts
        elif not (given := GivenPrompts(prompts)):
            raise UserError("prompts is empty: expected at least one; give some.")
        options_given = read(words(config, asked, GenerateConfig, presets=None))
        if options_given.resume and not options_given.out:
            raise OptionError("resume", True, "with it the file to go on with, in out")
        results = command.generate(options_given, given, saved)
        return [Answer(**row) for row in results.read()]


def session(
    config: Config = None, *, run: "SavedRun | str | Path | None" = None, **options: Any
) -> "TextSession":
    """Opens an engine that generates any number of times. Raises UserError, one sentence about what
    is wrong.

        session = pat_jax.session(model=folder)
        answers = session.generate(["Once"], n=4)

    Args:
      config: a YAML file, or a dictionary of options.
      run: a run of `train` or `sft` whose learned policy generates, instead of `model`.
      options: win over `config`. Their names are those of `python -m pat_jax.generate --help`,
        except the ones about files. Sampling options are defaults for `TextSession.generate`.
    """
    from pat_jax.commands.generate import prepared

    with in_one_sentence():
        saved, options = _of_run(run, options)
        asked = read(words(config, options, GenerateConfig, presets=None), prog="pat_jax.session")
        for field in fields(asked):
            if field.name in _OF_FILES and getattr(asked, field.name) != field.default:
                raise OptionError(field.name, getattr(asked, field.name), _NO_FILES)
        return prepared(asked, saved).open()


def _of_run(
    run: "SavedRun | str | Path | None", options: dict[str, Any]
) -> "tuple[SavedRun | None, dict[str, Any]]":
    """Returns the run, and the options with its model. Raises UserError if they have another."""
    from pat_jax.run.results.saved_run import SavedRun

    if run is None:
        return None, dict(options)
    saved = SavedRun.of(run)
    if "model" in options:
        raise OptionError("model", options["model"], "none with run, whose policy generates")
    return saved, {**options, "model": saved.config.model}


offer(generate, main)
