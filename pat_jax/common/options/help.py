"""Writes the text of --help: what a command does, its usage, and its options, page by page."""

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import yaml

from pat_jax.common.errors import UserError
from pat_jax.common.options.declared import AUTO, Option, is_among, named
from pat_jax.common.options.names import looked_up

ALL = "all"
MOST = 40  # options of a command that has no further pages
_INDENT: Any = {"initial_indent": " " * 8, "subsequent_indent": " " * 8}
_TABLE = yaml.safe_load(Path(__file__).parents[1].joinpath("help_pages.yaml").read_text("utf-8"))
_FIRST: Mapping[str, Sequence[str]] = {use: names.split() for use, names in _TABLE["first"].items()}
BESIDE: Mapping[str, str] = _TABLE["beside"]
_PAGES: Mapping[str, Sequence[str]] = {
    page: names.split() for page, names in _TABLE["pages"].items()
}


def pages(options: Sequence[Option], command: str = "") -> dict[str, list[Option]]:
    """Returns the options by the page of --help that has them; the first page is called "". A
    command with few options has only that one."""
    if len(options) <= MOST:
        return {"": list(options)}
    usual = " ".join(" ".join(names) for names in _FIRST.values())
    first = _TABLE["first_of"].get(command, usual).split()
    found: dict[str, list[Option]] = {"": []}
    for option in options:
        named = (page for page, names in _PAGES.items() if is_among(option.name, names))
        page = "" if option.name in first else next(named, option.section or "other")
        found.setdefault(page, []).append(option)
    return found


def help_text(
    config: object,
    sources: Sequence[Option],
    options: Sequence[Option],
    prog: str,
    page: str = "",
    lists: Mapping[str, Sequence[str]] = {},
) -> str:
    """Returns the text of --help, or of --help PAGE. Raises UserError if there is no such page.

    Args:
      config: has the defaults; its class's docstring says what the command does.
      sources: options that stand for others, such as --config.
      page: the name of a page; "" is the first one, and "all" are all of them.
      lists: lines of further pages by name, which have no options.
    """
    options = list(_with_names(options))
    by_page = pages(options, prog.rpartition(".")[2])
    further = [name for name in by_page if name]
    if page in lists:
        return "\n".join([f"{prog} --help {page}", "", *lists[page]])
    if page not in (ALL, *by_page):
        names = ", ".join([*further, *lists, ALL])
        raise UserError(f"--help has no page {page!r}: expected one of {names}.")
    if page and page != ALL:
        return "\n".join([f"{prog} --help {page}", "", *_by_section(config, by_page[page])][:-1])
    lines = [
        inspect.cleandoc(type(config).__doc__ or ""),
        "",
        _usage(sources, options, prog),
        _order(sources, options),
        "",
    ]
    if page == ALL or not further:
        return "\n".join([*lines, *_by_section(config, [*sources, *options])][:-1])
    lines += _by_use([*sources, *by_page[""]])
    names = ", ".join([*further, *lists])
    more = f"Other options: --help PAGE, where PAGE is {names}; --help {ALL} shows every option."
    return "\n".join([*lines, textwrap.fill(more, 100)])


def _with_names(options: Sequence[Option]) -> Iterator[Option]:
    """Yields the options with their names in TRL and verl, if these mean this option here."""
    known = named(options)
    for option in options:
        ours = (option.name, option.short)
        texts = filter(None, BESIDE.get(option.name, "").split("; "))
        here = [text for text in texts if looked_up(text.split()[1], known)[0] in ours]
        yield replace(option, beside="; ".join(here))


def _order(sources: Sequence[Option], options: Sequence[Option]) -> str:
    names = ", ".join(f"--{option.name}" for option in sources)
    has_sections = any(option.section for option in options)
    bare = " The section of a name may be left out." if has_sections else ""
    return f"Later wins: defaults, {names}, the command line.{bare}"


def _by_use(options: Sequence[Option]) -> Iterator[str]:
    by_name = {option.name: option for option in options}
    for use, names in _FIRST.items():
        if here := [by_name[name] for name in names if name in by_name]:
            yield from (f"{use}:", "")
            for option in here:
                yield from _explained(option)


def _by_section(config: object, options: Sequence[Option]) -> Iterator[str]:
    section = ""
    for option in options:
        if option.section != section:
            section = option.section
            yield from (f"{section}: {inspect.cleandoc(attrgetter(section)(config).__doc__)}", "")
        yield from _explained(option)


def _explained(option: Option) -> Iterator[str]:
    choices = f"One of {', '.join(_choices(option))}. " if _has_many(option) else ""
    headline = _headline(option)
    text = choices + option.help
    beside = f" [{option.beside}]" if option.beside else ""
    if len(headline + beside) <= 100:
        headline += beside
    else:
        text += beside
    yield from (headline, textwrap.fill(text, 96, **_INDENT), "")


def _usage(sources: Sequence[Option], options: Sequence[Option], prog: str) -> str:
    """Returns the usage line, with only the forms that this command takes."""
    sections = any(option.section for option in options)
    forms = [f"[--{option.name} {option.name.upper()}]" for option in sources]
    forms += ["[--OPTION VALUE ...]"] + ["[--SECTION.OPTION VALUE ...]"] * sections
    words = " ".join([prog, *forms, "[--help [PAGE]]", "[--version]"])
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
