"""Turns options given in Python into the words of a command line.

    words("demo", {"steps": 5, "rollout": {"top_p": 0.9}})  ->  --preset=demo --steps=5
    --rollout.top_p=0.9

Knows Python's values. Does not know what an option means, nor its valid values:
`command_line.parse` reads the words, with the same error messages.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError, shown
from pat_jax.common.options.declared import NONE_OF_MANY, Option, options_of
from pat_jax.common.options.files import preset_names
from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import PRESETS
from pat_jax.config.run import RunConfig

Config = str | os.PathLike[str] | Mapping[str, Any] | None


def words(
    config: Config,
    options: Mapping[str, Any],
    config_class: type = RunConfig,
    presets: Path | None = PRESETS,
) -> list[str]:
    """Returns the words of a command line. Raises UserError if `config` is none of the kinds below,
    or if a value has a type that no option has.

    Args:
      config: the name of a preset, a YAML file, or options.
      options: win over `config`. They have the command's names; a section is a mapping. An option
        of None is not given.
      presets: the folder of the presets' YAML files; None: there are none.
    """
    known = {
        name: option
        for option in options_of(config_class())
        for name in (option.name, option.short)
        if name
    }
    if not isinstance(config, Mapping):
        return [*_source(config, presets), *_words(options, "", known)]
    return [*_words(config, "", known), *_words(options, "", known)]


def _source(config: str | os.PathLike[str] | None, presets: Path | None) -> list[str]:
    if config is None:
        return []
    text = os.fspath(config) if isinstance(config, str | os.PathLike) else None
    names = preset_names(presets) if presets else []
    if text in names:
        return [f"--preset={text}"]
    if text is not None and (os.path.isfile(text) or Path(text).suffix in (".yaml", ".yml")):
        return [f"--config={text}"]
    known = f"the name of a preset ({', '.join(names)}), " if names else ""
    raise UserError(
        f"config is {shown(config)}: expected {known}a YAML file of options, or a dictionary of them; options "
        "can be given by their names as well."
    )


def _words(options: Mapping[str, Any], prefix: str, known: Mapping[str, Option]) -> Iterator[str]:
    sections = {name.rpartition(".")[0] for name in known} - {""}
    for key, value in options.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name in sections:
            yield from _words(value, f"{name}.", known)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            texts = [_text(name, each) for each in value]
            if len(texts) > 1 and name in known and not known[name].takes_many:
                raise OptionError(name, value, known[name].expected)
            if any(text.startswith("--") for text in texts):
                raise OptionError(name, value, "texts that do not begin with --")
            one = texts[0] if texts else NONE_OF_MANY
            yield from [f"--{name}", *texts] if len(texts) > 1 else [f"--{name}={one}"]
        elif value is not None:
            yield f"--{name}={_text(name, value)}"


def _text(name: str, value: object) -> str:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of NumPy or JAX
        value = value.item()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    try:
        if isinstance(value, int | float):
            return repr(value)
        if isinstance(value, Mapping):  # of an option that is a JSON object
            return json.dumps(dict(value))
    except (TypeError, ValueError):  # no JSON, or an integer of more digits than Python writes
        pass
    raise OptionError(name, value, "a number, text, true or false, or several of them in a list")
