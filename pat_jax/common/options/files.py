"""Reads options from YAML files, with the line where each option is set."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pat_jax.common.errors import UserError, together
from pat_jax.common.options.declared import Option
from pat_jax.common.options.names import UNKNOWN, is_section_of_others, of_today, resolved
from pat_jax.common.rules import OptionError


@dataclass(frozen=True)
class Setting:
    texts: Sequence[str]  # as written: one, unless the option takes many
    where: str = ""  # " in FILE, line N"; empty for the command line


def expanded(settings: Mapping[str, Setting], options: Mapping[str, Option]) -> dict[str, Setting]:
    """Returns the settings, with the options added that some of them stand for. An option that the
    same source sets directly wins."""
    found: dict[str, Setting] = {}
    for name, option in options.items():  # in their order: a part's own parts win over its name's
        setting = settings.get(name, Setting([]))
        value = " ".join(setting.texts).lower()
        for part, text in (option.stands_for or {}).get(value, {}).items():
            where = f" by {name} {value}{setting.where}"
            found[f"{option.section}.{part}"] = Setting([str(text)], where)
    return {**found, **settings}


def preset_names(presets: Path) -> list[str]:
    return sorted(path.stem for path in presets.glob("*.yaml"))


def read_preset(presets: Path, name: str, options: Mapping[str, Option]) -> dict[str, Setting]:
    names = preset_names(presets)
    if name not in names:
        raise OptionError("preset", name, "one of " + ", ".join(names))
    return read_yaml(presets / f"{name}.yaml", f"preset {name}", options)


def read_yaml(path: Path, title: str, options: Mapping[str, Option]) -> dict[str, Setting]:
    """Reads the options of a YAML file. `title` is its name in messages. Raises UserError if it
    cannot be read, is not a YAML mapping, or has an option that is not in `options`."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"cannot read {title}: it is no file; expected one of YAML text.")
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        with together(UNKNOWN) as errors:
            found = list(_walk(root, "", title, options, errors)) if root else []
    except OSError as error:
        raise UserError(f"cannot read {title}: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"cannot read {title}{line}: not YAML, {error.problem}.") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # such as bytes, or nested too deeply
        raise UserError(f"cannot read {title}: expected YAML text of options, in UTF-8.") from None
    settings: dict[str, Setting] = {}
    for name, setting in found:
        if name in settings:
            raise UserError(f"option --{name} is given twice{setting.where}: keep one.")
        settings[name] = setting
    return settings


def _walk(
    node: yaml.Node,
    prefix: str,
    title: str,
    options: Mapping[str, Option],
    errors: list[UserError],
) -> Iterator[tuple[str, Setting]]:
    """Yields the options of a mapping, and appends to `errors` what is wrong with other names."""
    line = f" in {title}, line {node.start_mark.line + 1}"
    if _is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{prefix.rstrip('.') or 'the text'}{line} is no list of `name: value`.")
    for key, value in node.value:
        where = f" in {title}, line {key.start_mark.line + 1}"
        name = f"{prefix}{key.value}"
        if _is_section(name, value, options):
            yield from _walk(value, f"{name}.", title, options, errors)
        elif of_today(name, _plain(value)) is None:
            continue
        else:
            try:
                option = options[resolved(name, options, where)]
            except UserError as error:
                errors.append(error)
                continue
            yield option.name, Setting(_texts(value, option, where), where)


def _is_section(name: str, value: yaml.Node, options: Mapping[str, Option]) -> bool:
    """Whether options are in the value: ours, or others that there is an answer to."""
    is_mapping = isinstance(value, yaml.MappingNode)
    if any(option.startswith(f"{name}.") for option in options):
        return is_mapping or _is_null(value) or name not in options
    keys = (key.value for key, _ in value.value) if is_mapping else ()
    return is_section_of_others(name, keys, options)


def _texts(node: yaml.Node, option: Option, where: str) -> list[str]:
    texts: list[str] = []
    values: list[Any] = [node]
    if option.takes_many and isinstance(node, yaml.SequenceNode):
        values = node.value
    for value in values:
        if not isinstance(value, yaml.ScalarNode) or _is_null(value):
            text = "null" if _is_null(value) else f"a YAML {value.id}"
            raise OptionError(option.name, text, option.expected, where)
        texts.append(of_today(option.name, value.value) or "")
    return texts


def _plain(node: yaml.Node) -> str:
    """Returns a value as text: a list as the texts of its values, a mapping as its YAML tag."""
    if isinstance(node, yaml.SequenceNode):
        return " ".join(map(_plain, node.value))
    return node.value if isinstance(node, yaml.ScalarNode) else node.tag


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"
