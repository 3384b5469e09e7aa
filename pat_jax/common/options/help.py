"""Writes the text of --help: what a command does, its usage, and every option."""

import inspect
import textwrap
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, get_args

from pat_jax.common.options.declared import AUTO, Option

_INDENT: Any = {"initial_indent": " " * 8, "subsequent_indent": " " * 8}


def help_text(
    config: object, sources: Sequence[Option], options: Sequence[Option], prog: str
) -> str:
    """Returns the text of --help. `config` has the defaults; its class's docstring says what the
    command does. `sources` are options that stand for others, such as --config."""
    names = ", ".join(f"--{option.name}" for option in sources)
    lines = [
        inspect.cleandoc(type(config).__doc__ or ""),
        "",
        _usage(sources, options, prog),
        f"Later wins: defaults, {names}, the command line.",
        "",
    ]
    section = ""
    for option in [*sources, *options]:
        if option.section != section:
            section = option.section
            lines += [f"{section}: {inspect.cleandoc(attrgetter(section)(config).__doc__)}", ""]
        choices = f"One of {', '.join(_choices(option))}. " if _has_many(option) else ""
        lines += [_headline(option), textwrap.fill(choices + option.help, 96, **_INDENT), ""]
    return "\n".join(lines[:-1])


def _usage(sources: Sequence[Option], options: Sequence[Option], prog: str) -> str:
    """Returns the usage line, with only the forms that this command takes."""
    sections = any(option.section for option in options)
    forms = [f"[--{option.name} {option.name.upper()}]" for option in sources]
    forms += ["[--OPTION VALUE ...]"] + ["[--SECTION.OPTION VALUE ...]"] * sections
    words = " ".join([prog, *forms, "[--help]", "[--version]"])
    return textwrap.fill(
        words, 100, initial_indent="usage: ", subsequent_indent=" " * 11, break_on_hyphens=False
    )


def _choices(option: Option) -> tuple[str, ...]:
    return () if option.takes_many else get_args(option.kind)


def _has_many(option: Option) -> bool:
    """Returns whether the choices do not fit into the option's first line."""
    return len(",".join([option.name, *_choices(option), str(option.default)])) > 80


def _headline(option: Option) -> str:
    choices = "{" + ",".join(_choices(option)) + "}"
    kind = choices if _choices(option) else option.expected
    kind = "NAME" if _has_many(option) else kind
    default = str(option.default).lower() if option.kind is bool else option.default
    default = " ".join(map(str, option.default)) if option.takes_many else default
    default = AUTO if option.is_auto else default
    note = "" if default in ("", None) else f" (default: {default})"
    full = f", or --{option.name}" if option.short else ""
    return f"  --{option.short or option.name} {kind}{full}{note}"
