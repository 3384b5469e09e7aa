"""The command line: defaults < preset < --config files < --section.name value.

Knows dataclasses, YAML and argv. Does not know what an option means: names, types, defaults and
bounds come from the configuration class, explanations from the string under each field.
"""

import ast
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from pat_jax.config import RunConfig
from pat_jax.errors import UserError
from pat_jax.rules import OptionError

PRESETS = Path(__file__).parent / "presets"
DEFAULT_PRESET = "demo"

Config = TypeVar("Config")

_SOURCES = ("preset", "config")  # options that stand for others
_INDENT: Any = {"initial_indent": " " * 8, "subsequent_indent": " " * 8}


@dataclass(frozen=True)
class Option:
    name: str  # dotted, as on the command line
    kind: Any  # bool, int, float, str or a Literal of strings
    default: Any
    help: str

    @property
    def expected(self) -> str:
        if get_origin(self.kind) is Literal:
            return "one of " + ", ".join(get_args(self.kind))
        names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
        return names[self.kind]

    def convert(self, text: str) -> Any:
        if self.kind is str or text in get_args(self.kind):
            return text
        if self.kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if self.kind in (int, float):
            try:
                value = self.kind(text)
            except ValueError:
                value = math.nan
            if math.isfinite(value):
                return value
        raise OptionError(self.name, text, self.expected)


@dataclass(frozen=True)
class Setting:
    text: str  # as it was written
    where: str = ""  # " in FILE, line N"; empty for the command line


def parse(
    argv: Sequence[str],
    config_class: type[Config] = RunConfig,
    *,
    prog: str = "python -m pat_jax.train",
    presets: Path | None = PRESETS,
) -> Config:
    """The configuration that `argv` (without the program's name) asks for.

    Args:
      argv: `--name value`, `--name=value`, or `--name` alone for a boolean; `-` stands for `_`.
      config_class: a frozen dataclass of bool, int, float, str, Literal or nested dataclass fields,
        each with a default, or of these or None.
      prog: how the command is called, for the first line of --help.
      presets: the folder of the YAML files that --preset can name; None offers none.

    Raises:
      UserError: with one sentence about the first mistake.
      SystemExit: 0, after printing the help.
    """
    default = config_class()
    options = {option.name: option for option in _options(default)}
    sources = _sources(presets)
    if not {"-h", "--help"}.isdisjoint(argv):
        print(_help(default, [*sources.values(), *options.values()], prog))
        raise SystemExit(0)
    settings = _settings(list(_scan(argv, sources | options)), presets, options)
    try:
        return _build(default, settings, options)
    except OptionError as error:
        where = settings[error.name].where if error.name in settings else ""
        raise OptionError(error.name, error.value, error.expected, where) from None


def dump(config: Any) -> str:
    """The resolved configuration as YAML; `--config` reads it back to an equal one."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def run_command(main: Callable[[], None]) -> None:
    """Run a command; a `UserError` becomes `error: …` on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _options(config: Any, prefix: str = "") -> Iterator[Option]:
    hints, texts = get_type_hints(type(config)), _field_texts(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _options(value, f"{prefix}{field.name}.")
        else:
            kind = _without_none(hints[field.name])
            yield Option(prefix + field.name, kind, value, texts[field.name])


def _without_none(kind: Any) -> Any:
    """`float` of `float | None`: None is what such an option is where nobody sets it."""
    kinds = [each for each in get_args(kind) if each is not type(None)]
    return kinds[0] if type(None) in get_args(kind) else kind


def _sources(presets: Path | None) -> dict[str, Option]:
    config = Option("config", str, "", "A YAML file of options; may be given more than once.")
    if presets is None:
        return {"config": config}
    names = ", ".join(_preset_names(presets))
    return {
        "preset": Option("preset", str, DEFAULT_PRESET, f"A ready-made run: {names}."),
        "config": config,
    }


def _field_texts(config_class: type) -> dict[str, str]:
    """The string under each field of a dataclass, joined to one line; inherited ones included."""
    texts = {}
    for base in reversed(config_class.__mro__):
        texts |= _own_field_texts(base) if is_dataclass(base) else {}
    return texts


def _own_field_texts(config_class: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts


def _scan(argv: Sequence[str], options: Mapping[str, Option]) -> Iterator[tuple[str, str]]:
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UserError(f"unexpected {word!r}: options are written --section.name value.")
        name, has_value, text = word[2:].partition("=")
        if name not in options and (name := name.replace("-", "_")) not in options:
            raise _unknown(name, options)
        if not has_value:
            if rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            elif options[name].kind is bool:
                text = "true"
            else:
                raise UserError(f"option --{name} has no value: expected {options[name].expected}.")
        yield name, text


def _unknown(name: str, options: Mapping[str, Option], where: str = "") -> UserError:
    if any(known.startswith(f"{name}.") for known in options):
        return UserError(f"--{name}{where} is a section: write --{name}.OPTION (see --help).")
    by_leaf = {known.rpartition(".")[2]: known for known in reversed(list(options))}
    leaf = get_close_matches(name.rpartition(".")[2], by_leaf, 1)
    near = get_close_matches(name, options, 1) if "." in name or not leaf else []
    near = near or [by_leaf[match] for match in leaf]
    hint = f"did you mean --{near[0]} (see --help)?" if near else "--help lists every option."
    return UserError(f"unknown option --{name}{where}: {hint}")


def _settings(
    words: Sequence[tuple[str, str]], presets: Path | None, options: Mapping[str, Option]
) -> dict[str, Setting]:
    """What was set and where, the later source winning, whatever the order of the words."""
    settings: dict[str, Setting] = {}
    if presets:
        preset = ([text for name, text in words if name == "preset"] or [DEFAULT_PRESET])[-1]
        settings = _read_preset(presets, preset, options)
    for name, text in words:
        if name == "config":
            settings |= _read_yaml(Path(text), text, options)
    return settings | {name: Setting(text) for name, text in words if name in options}


def _preset_names(presets: Path) -> list[str]:
    return sorted(path.stem for path in presets.glob("*.yaml"))


def _read_preset(presets: Path, name: str, options: Mapping[str, Option]) -> dict[str, Setting]:
    names = _preset_names(presets)
    if name not in names:
        raise OptionError("preset", name, "one of " + ", ".join(names))
    return _read_yaml(presets / f"{name}.yaml", f"preset {name}", options)


def _read_yaml(path: Path, title: str, options: Mapping[str, Option]) -> dict[str, Setting]:
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"cannot read {title}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"cannot read {title}: it is not UTF-8 text.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"cannot read {title}{line}: not YAML, {error.problem}.") from None
    except yaml.YAMLError:
        raise UserError(f"cannot read {title}: it is not YAML text.") from None
    settings: dict[str, Setting] = {}
    for name, setting in _walk(root, "", title, options) if root else ():
        if name in settings:
            raise UserError(f"option --{name} is given twice{setting.where}: keep one.")
        settings[name] = setting
    return settings


def _walk(
    node: yaml.Node, prefix: str, title: str, options: Mapping[str, Option]
) -> Iterator[tuple[str, Setting]]:
    line = f" in {title}, line {node.start_mark.line + 1}"
    if _is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{prefix.rstrip('.') or 'the text'}{line} is no list of `name: value`.")
    for key, value in node.value:
        where = f" in {title}, line {key.start_mark.line + 1}"
        name = f"{prefix}{key.value}"
        if any(option.startswith(f"{name}.") for option in options):
            yield from _walk(value, f"{name}.", title, options)
        elif name not in options:
            raise _unknown(name, options, where)
        elif not isinstance(value, yaml.ScalarNode) or _is_null(value):
            text = "null" if _is_null(value) else f"a YAML {value.id}"
            raise OptionError(name, text, options[name].expected, where)
        else:
            yield name, Setting(value.value, where)


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _build(config: Any, settings: Mapping[str, Setting], options: Mapping, prefix: str = "") -> Any:
    values = {}
    for field in fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if is_dataclass(value):
            values[field.name] = _build(value, settings, options, f"{name}.")
        elif name in settings:
            values[field.name] = options[name].convert(settings[name].text)
    return replace(config, **values)


def _help(config: object, options: Sequence[Option], prog: str) -> str:
    sources = ", ".join(f"--{option.name}" for option in options if option.name in _SOURCES)
    lines = [
        f"usage: {prog} [--section.name value ...]",
        "",
        inspect.cleandoc(type(config).__doc__ or ""),
        f"Later wins: defaults, {sources}, the command line.",
        "",
    ]
    section = ""
    for option in options:
        if (here := option.name.rpartition(".")[0]) != section:
            section = here
            lines += [f"{here}: {inspect.cleandoc(attrgetter(here)(config).__doc__)}", ""]
        choices = get_args(option.kind)
        kind = "{" + ",".join(choices) + "}" if choices else option.expected
        default = str(option.default).lower() if option.kind is bool else option.default
        note = "" if default in ("", None) else f" (default: {default})"
        text = f"--{option.name} {kind}{note}"
        lines += [f"  {text}", textwrap.fill(option.help, 96, **_INDENT), ""]
    return "\n".join(lines[:-1])
