"""Turns options given in Python into the words of a command line.

    words("demo", {"steps": 5, "rollout": {"top_p": 0.9}})  ->  --preset=demo --steps=5
    --rollout.top_p=0.9

Knows Python's values, and answers an unknown name in Python's words. Does not know what an option
means, nor its valid values: `command_line.parse` reads the words, with the same error messages.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pat_jax.common.errors import UserError, shown, together
from pat_jax.common.options.declared import NONE_OF_MANY, Option, named, options_of
from pat_jax.common.options.files import preset_names
from pat_jax.common.options.names import (
    OF_POLICY,
    UNKNOWN,
    is_section_of_others,
    meant,
    resolved,
    twice,
    use_of,
)
from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import PRESETS
from pat_jax.config.run import RunConfig

SOURCES = ("preset", "config")  # that others are read from
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
    known = named(options_of(config_class()))
    if not isinstance(config, Mapping):
        return [*_source(config, presets), *_words(options, known)]
    return [*_words(config, known), *_words(options, known)]


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


def _words(options: Mapping[str, Any], known: Mapping[str, Option]) -> Iterator[str]:
    given: dict[str, tuple[str, object]] = {}
    for name, ours, value in _answered(options, known):
        ours = known[ours].name if ours in known else ours  # of `data`: data.files
        before, other = given.setdefault(ours, (name, value))
        if {before, name} - known.keys() and before != name and other != value:
            raise twice(_written(before, _literal(other)), _written(name, _literal(value)))
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            texts = [_text(ours, each) for each in value]
            if len(texts) > 1 and ours in known and not known[ours].takes_many:
                raise OptionError(ours, value, known[ours].expected)
            if any(text.startswith("--") for text in texts):
                raise OptionError(ours, value, "texts that do not begin with --")
            one = texts[0] if texts else NONE_OF_MANY
            yield from [f"--{ours}", *texts] if len(texts) > 1 else [f"--{ours}={one}"]
        else:
            yield f"--{ours}={_text(ours, value)}"


def _answered(
    options: Mapping[str, Any], known: Mapping[str, Option]
) -> list[tuple[str, str, object]]:
    """Returns each option as it is named, its full name and its value. Raises UserError about all
    that are not known."""
    found = []
    with together(UNKNOWN) as errors:
        for name, value in _flat(options, "", known):
            try:
                found.append((name, _resolved(name, value, known), value))
            except UserError as error:
                errors.append(error)
    return found


def _flat(
    options: Mapping[str, Any], prefix: str, known: Mapping[str, Option]
) -> Iterator[tuple[str, Any]]:
    """Yields each option that is given by its dotted name; those of a section may be in a mapping."""
    for key, value in options.items():
        name = f"{prefix}{key}"
        if value is None:
            continue
        if isinstance(value, Mapping) and _is_section(name, value, known):
            yield from _flat(value, f"{name}.", known)
        else:
            yield name, value


def _is_section(name: str, value: Mapping[str, Any], known: Mapping[str, Option]) -> bool:
    """Whether options are in the mapping: ours, or others that there is an answer to."""
    if any(each.startswith(f"{name}.") for each in known):
        return True
    return not hasattr(value, "column_names") and is_section_of_others(name, value, known)


def _resolved(name: str, value: object, known: Mapping[str, Option]) -> str:
    """Returns the full name of an option. Raises UserError in a caller's words if there is none."""
    literal = _literal(value)

    def write(option: str, text: str) -> str:
        leaf = option.rpartition(".")[2]
        if option in known:
            option = known[option].short or option
        is_alone = (
            "." not in name and use_of(option) <= OF_POLICY and meant(leaf, known) == [option]
        )
        text = text if text in ("", literal) else repr(yaml.safe_load(text))
        return _written(leaf if is_alone else option, text)

    try:
        return name if name in SOURCES else resolved(name, known, "", write, literal)
    except UserError as error:
        sentence = str(error).replace(" (see --help)", "")
        raise UserError(sentence.replace("--help all", "--help all of a command")) from None


def _written(name: str, text: str) -> str:
    """Returns an option and its value, or "" for none, as an argument of a function: `beta=0.1`, or
    `eval={'every': 5}` for one of a section."""
    *sections, leaf = name.split(".")
    if not sections:
        return f"{leaf}={text}" if text else leaf
    inner = f"{{{leaf!r}: {text or '...'}}}"
    for section in reversed(sections[1:]):
        inner = f"{{{section!r}: {inner}}}"
    return f"{sections[0]}={inner}"


def _literal(value: object) -> str:
    """Returns a short value as it is written in a program, a function as its name."""
    name = getattr(value, "__name__", "")
    if callable(value) and name.isidentifier():
        return name
    is_plain = isinstance(value, bool | int | float | str)
    return shown(value) if is_plain and len(shown(value)) <= 40 else "..."


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
