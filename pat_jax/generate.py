"""`python -m pat_jax.generate`: completions of a file of prompts, one JSON line each.

Reads and writes line by line. A wrong line gets its error as its result; other lines are not
affected. A killed run continues with --resume. From Python, use `pat_jax.session(...)`.
"""

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.common.rules import OptionError
from pat_jax.common.run_command import in_one_sentence, run_command
from pat_jax.config.command_line import parse
from pat_jax.config.from_python import Config, words

if TYPE_CHECKING:
    from pat_jax.batch_generation.text_session import TextSession
    from pat_jax.run.results.saved_run import SavedRun

_OF_FILES = ("prompts", "out", "resume")
_NO_FILES = "none here: it belongs to files of prompts; give prompts to `generate`"


def main() -> None:
    config = parse(sys.argv[1:], GenerateConfig, prog="python -m pat_jax.generate", presets=None)
    from pat_jax.commands.generate import generate  # and JAX, once the options are right

    generate(config)


def session(
    config: Config = None, *, run: "SavedRun | str | Path | None" = None, **options: Any
) -> "TextSession":
    """Opens an engine that generates any number of times: `session(model=DIR).generate(["Once"],
    n=4)`. Raises UserError, one sentence about what is wrong.

    Args:
      config: a YAML file, or a dictionary of options.
      run: a run whose learned policy generates, instead of --model.
      options: win over `config`. Their names are those of `python -m pat_jax.generate --help`,
        except the ones about files. Sampling options are defaults for `TextSession.generate`.
    """
    from pat_jax.batch_generation.text_session import TextSession
    from pat_jax.commands.generate import prepared
    from pat_jax.run.results.saved_run import SavedRun

    with in_one_sentence():
        if run is not None and not isinstance(run, SavedRun):
            run = SavedRun(run)
        if run is not None:
            own = run.config
            options = {"compute_dtype": own.compute_dtype, **options, "model": own.model}
        argv = words(config, options, GenerateConfig, presets=None)
        asked = parse(argv, GenerateConfig, prog="pat_jax.session", presets=None)
        for field in fields(asked):
            if field.name in _OF_FILES and getattr(asked, field.name) != field.default:
                raise OptionError(field.name, getattr(asked, field.name), _NO_FILES)
        parts = prepared(asked, run)
        session = parts.open()
        return TextSession(session, parts.tokenizer, asked.overrides, parts.recommended, asked.seed)


if __name__ == "__main__":
    run_command(main)
