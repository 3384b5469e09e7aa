"""Turns the fields of a configuration class into options.

Names, types and defaults come from the fields, help texts from the string under each. Does not know
where values are written, nor what an option means.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from dataclasses import field as dataclass_field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Literal, cast, get_args, get_origin, get_type_hints

from pat_jax.common.rules import OptionError, Rule

# Metadata of a section's one field that can be set by the section's bare name (`--data`).
SHORT_FORM = {"is_short_form": True}
_STANDS_FOR = "stands_for"
_IS_AUTO = "is_auto"
_RULE = "rule"
AUTO = "auto"
NONE_OF_MANY = "[]"  # an empty list, for an option that takes several values
LARGEST = 2**63 - 1  # what arrays, seeds and files can hold


def stands_for(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the metadata of an option whose values set other options of its section."""
    return {_STANDS_FOR: values}


def option(default: Any, rule: Rule, **metadata: Any) -> Any:
    """Declares a field with a default, and the rule that its value must meet unless it is None."""
    return dataclass_field(default=default, metadata={_RULE: rule, **metadata})


def auto(rule: Rule) -> Any:
    """Declares a number that is None, written `auto`, until `config/by_model.py` sets it. Nothing
    reads it before, so its type does not include None."""
    return option(None, rule, **{_IS_AUTO: True})


@dataclass(frozen=True)
class Options:
    """The options of a command, or a section of them. Each value is checked by its field's rule.

    Classes that share options inherit them. A class may declare an inherited field again with
    another default; the help text is inherited unless it has its own.
    """

    SECTION = ""  # prefix of the names of the options, such as "rollout."
    READ: ClassVar[str] = "*"  # patterns of the names that a command offers; it may inherit others

    def __post_init__(self):
        """Raises OptionError if a value breaks the rule of its field."""
        for each in filter(lambda field: _RULE in field.metadata, fields(self)):
            value = getattr(self, each.name)
            is_valid, expected = each.metadata[_RULE]
            self.need(each.name, value is None or is_valid(value), expected)

    def need(self, name: str, is_valid: bool, expected: str) -> None:
        """Raises OptionError unless the value of the option `name` is valid. The name may have
        sections, such as "rollout.compile"."""
        if not is_valid:
            value = attrgetter(name)(self)
            words = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise OptionError(self.SECTION + name, words, expected)

    def need_defaults(self, names: Iterable[str], why: str) -> None:
        """Raises OptionError unless each of these options, which have no effect, has its default.
        `why` is the end of the error's sentence."""
        of_fields = {each.name: each for each in fields(self)}
        for name in names:
            first, _, rest = name.partition(".")
            default: Any = of_fields[first].default
            if rest:
                section = cast(Callable[[], Any], of_fields[first].default_factory)
                default = attrgetter(rest)(section())
            if attrgetter(name)(self) == default:
                continue
            texts = map(str, default) if isinstance(default, tuple) else [f"{default}"]
            words = f"{default:g}" if isinstance(default, float) else " ".join(texts) or "nothing"
            words = words.lower() if isinstance(default, bool) else words
            if default is None:
                words = AUTO if named(options_of(self))[name].is_auto else "nothing"
            self.need(name, False, f"{words} {why}; leave it out")

    def need_only(self, taken: Collection[str], why: str) -> None:
        """Raises OptionError unless all options have their defaults but those in `taken`: names, or
        sections. `why` is the end of the error's sentence."""
        names = (option.name for option in options_of(self))
        unused = (name for name in names if not {name, name.partition(".")[0]} & {*taken})
        self.need_defaults(unused, why)

    def shared(self, base: type["Options"]) -> dict[str, Any]:
        """Returns the values of the options that are inherited from `base`."""
        return {each.name: getattr(self, each.name) for each in fields(base)}


@dataclass(frozen=True)
class Option:
    name: str  # dotted, as on the command line
    kind: Any  # bool, int, float, str, a Literal of strings, or tuple[str, int or float, ...]
    default: Any
    help: str
    short: str = ""  # the name of its section, if --SECTION alone also sets the option
    stands_for: Mapping[str, Mapping[str, Any]] | None = None  # see `stands_for`
    is_auto: bool = False  # see `auto`
    beside: str = ""  # its names in other projects, for --help

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def takes_many(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def expected(self) -> str:
        if self.takes_many:
            each = {int: "integer", float: "number", str: "text"}[self._each]
            return f"one {each} or several"
        if get_origin(self.kind) is Literal:
            return "one of " + ", ".join(get_args(self.kind))
        names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
        return names[self.kind] + f" or {AUTO}" * self.is_auto

    @property
    def _each(self) -> Any:
        """The type of one value."""
        return get_args(self.kind)[0] if self.takes_many else self.kind

    def convert(self, texts: Sequence[str]) -> Any:
        """Converts the texts to the option's value; there is one text unless the option takes
        several. Raises OptionError if that fails."""
        for text in texts:
            self._check_text(text)
        if self.takes_many:
            is_none = list(texts) == [NONE_OF_MANY]
            return () if is_none else tuple(map(self._convert, texts))
        (text,) = texts
        return None if self.is_auto and text == AUTO else self._convert(text)

    def _convert(self, text: str) -> Any:
        kind = self._each
        if kind is str or text in get_args(kind):
            return text
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in (int, float):
            try:
                value = kind(text)
            except ValueError:  # also raised for more digits than Python reads
                value = math.nan
            if kind is int and abs(value) > LARGEST:
                raise OptionError(self.name, text, "an integer of at most 64 bits")
            if math.isfinite(value):
                return value
        near = get_close_matches(text, map(str, get_args(self.kind)), 1)
        hint = f" (did you mean {near[0]}?)" if near and not self.takes_many else ""
        raise OptionError(self.name, text, f"{self.expected}{hint}")

    def _check_text(self, text: str) -> None:
        """Raises OptionError unless the text is UTF-8 without NUL, as libraries need file names."""
        try:
            text.encode()
        except UnicodeEncodeError:
            expected = "UTF-8 text (where the terminal's is, set PYTHONUTF8=1 or LC_ALL=C.UTF-8)"
            raise OptionError(self.name, text, expected) from None
        if "\0" in text:
            raise OptionError(self.name, text, "text without a NUL character")


def is_among(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def options_of(config: Any) -> Iterator[Option]:
    """Yields the options that a command offers, in the order of `every_option`."""
    offered = config.READ.split()
    return (option for option in every_option(config) if is_among(option.name, offered))


def every_option(config: Any, prefix: str = "") -> Iterator[Option]:
    """Yields every option of a configuration: its own first, then those of each section."""
    hints, texts = get_type_hints(type(config)), _field_texts(type(config))
    names = [name for base in type(config).__mro__ for name in inspect.get_annotations(base)]
    ordered = sorted(fields(config), key=lambda field: names.index(field.name))
    values = {field: getattr(config, field.name) for field in ordered}
    for field, value in values.items():
        name = field.name
        is_short = "is_short_form" in field.metadata
        if not is_dataclass(value):
            kind = _without_none(hints[name])
            short = prefix.rstrip(".") if is_short else ""
            others = field.metadata.get(_STANDS_FOR)
            is_auto = _IS_AUTO in field.metadata
            yield Option(prefix + name, kind, value, texts[name], short, others, is_auto)
    for field, value in values.items():
        if is_dataclass(value):
            yield from every_option(value, f"{prefix}{field.name}.")


def named(options: Iterable[Option]) -> dict[str, Option]:
    """Returns the options by their names, short ones included."""
    return {name: one for one in options for name in (one.name, one.short) if name}


def build(
    config: Any, texts: Mapping[str, Sequence[str]], options: Mapping[str, Option], prefix: str = ""
) -> Any:
    """Returns `config` with the options that `texts` sets. Raises OptionError at the first
    mistake."""
    values = {}
    for field in fields(config):
        name = prefix + field.name
        value = getattr(config, field.name)
        if is_dataclass(value):
            values[field.name] = build(value, texts, options, f"{name}.")
        elif name in texts:
            values[field.name] = options[name].convert(texts[name])
    return replace(config, **values)


def _without_none(kind: Any) -> Any:
    """Returns `float` for `float | None`, the type of an option that is None until it is set."""
    kinds = [each for each in get_args(kind) if each is not type(None)]
    return kinds[0] if type(None) in get_args(kind) else kind


def _field_texts(config_class: type) -> dict[str, str]:
    """Maps the fields of a dataclass, inherited ones included, to their help texts in one line."""
    texts = {}
    for base in reversed(config_class.__mro__):
        texts |= _own_field_texts(base) if is_dataclass(base) else {}
    return texts


@cache  # reading source code takes most of the time of parsing
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
