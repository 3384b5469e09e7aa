"""Finds the option that a name stands for, or suggests one: for the last part of a name, a typing
mistake, or a name from another project."""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import yaml

from pat_jax.common.errors import UserError
from pat_jax.common.options.declared import Option
from pat_jax.common.rules import OptionError

_TEXT = Path(__file__).parents[1].joinpath("option_names.yaml").read_text("utf-8")
_TABLE = yaml.load(_TEXT, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # a tenth of the time
_SAME: Sequence[Sequence[str]] = [line.split() for line in _TABLE["same"]]
_RETIRED: Mapping[str, Mapping[str, str | None]] = _TABLE["retired"]
_NOT_OFFERED = frozenset(_TABLE["not_offered"].split())
_ANSWERS = [
    (frozenset(one["names"].split()), f"is not {kind}: {one['answer']}.")
    for kind, section in (("offered", "instead"), ("needed", "not_needed"))
    for one in _TABLE[section]
]
_LEAVE_OUT = "is not offered here: leave it out (see --help)."
UNKNOWN = "names are no options here, or have another name:"  # a line about several
_OPTION = re.compile(r"--(\w+(?:\.\w+)*)(?:=(\S*\w))?")  # of an answer, with a value or without
_NEARLY = 0.8  # the least similarity of a mistake of typing

# If several sections have an option of one name, the one with the least number is meant: what the
# policy learns by, before what is watched and saved, before other models.
OF_POLICY = 1
_BY_USE = {"": 0} | dict.fromkeys(("optimizer", "rollout", "algorithm"), OF_POLICY)
_BY_USE |= dict.fromkeys(("critic", "critic.lora", "teacher", "reward_model", "warm_start"), 3)
_HELD_OUT = {"val", "valid", "validation", "test", "eval", "evaluation", "dev", "heldout"}

Write = Callable[[str, str], str]


def in_shell(name: str, value: str) -> str:
    """Returns how an option and its value, or "" for none, are written on the command line."""
    return f"--{name} {value}".rstrip()


def of_today(name: str, text: str) -> str | None:
    """Returns the value that an option in a file has today: `text`, or what has replaced it since
    an older run wrote it. Returns None if the option is to be left out."""
    return _RETIRED.get(name, {}).get(text, text)


def resolved(
    name: str, known: Collection[str], where: str = "", write: Write = in_shell, given: str = ""
) -> str:
    """Returns the known name that `name` is, or is the last part of. Raises UserError if there is
    none, or if it is not clear which one is meant; the others are as in `unknown`."""
    found = meant(name, known)
    if not found:
        raise unknown(name, known, where, write, given)
    if len(found) > 1:
        several = " or ".join(write(each, given) for each in found)
        raise UserError(
            f"option {write(name, given)}{where} may be {several}: write which of them."
        )
    return found[0]


def meant(name: str, known: Collection[str]) -> list[str]:
    """Returns the known names that `name` may stand for: itself, or those whose last part it is,
    unless others call something else so."""
    if name in known:
        return [name]
    found = [each for each in known if each.rpartition(".")[2] == name]
    if _is_section(name, known) or looked_up(name, known)[0] not in found:
        return []
    return [each for each in found if use_of(each) == min(map(use_of, found))]


def _is_section(name: str, known: Collection[str]) -> bool:
    return any(each.startswith(f"{name}.") for each in known)


def is_section_of_others(name: str, keys: Iterable[str], known: Collection[str]) -> bool:
    """Whether the keys of a mapping that is given as `name` are options that have an answer."""
    return not meant(name, known) and any(any(looked_up(f"{name}.{key}", known)) for key in keys)


def use_of(name: str) -> int:
    return _BY_USE.get(name.rpartition(".")[0], OF_POLICY + 1)


def unknown(
    name: str, known: Collection[str], where: str = "", write: Write = in_shell, given: str = ""
) -> UserError:
    """Returns the error for an unknown name, with a suggestion.

    Args:
      where: where it was written, for the sentence.
      write: returns an option and its value as the user writes them.
      given: the value that the name was given, for `write`.
    """
    asked = write(name, given)
    if _is_section(name, known):
        inside = write(f"{name}.OPTION", "")
        return UserError(f"{asked}{where} is a section: write {inside} (see --help).")
    near, answer = looked_up(name, known)
    if name.startswith("no_"):  # a switch that is turned off
        given = "false"
        answer = answer.replace("is not needed", "is not offered", 1)
    if answer:
        return UserError(f"option {asked}{where} {worded(answer, write)}")
    hint = f"did you mean {write(near, given)}?" if near else ""
    return UserError(f"unknown option {asked}{where}: {hint or '--help all lists every option.'}")


def worded(answer: str, write: Write = in_shell) -> str:
    """Returns an answer of the table, with options and their values as the user writes them."""
    return _OPTION.sub(lambda found: write(found[1], found[2] or ""), answer)


def twice(one: str, other: str) -> UserError:
    """Returns the error for one option under two names, with two values."""
    return UserError(f"{one} and {other} are one option: keep one of them.")


def no_option(word: str, options: Mapping[str, Option]) -> UserError:
    """Returns the error for a word that does not begin with --, such as verl's NAME=VALUE."""
    name, _, text = word.lstrip("+").partition("=")
    if not re.fullmatch(r"[\w.]+=.*", word.lstrip("+"), re.DOTALL):
        return UserError(f"unexpected {word!r}: options are written --name value.")
    ours = looked_up(name, options)[0]
    if meant(name, options):
        ours = resolved(name, options, given=text)
    if ours is None:
        return unknown(name, options)
    option = options[ours]
    several = [one.strip(" '\"") for one in text.strip("[]").split(",")]
    texts = several if option.takes_many else [text]
    try:
        option.convert(texts)
        value = shlex.join(texts)
    except OptionError:
        value = f"and {option.expected}"
    return UserError(f"unexpected {word!r}: write --{ours} {value}.")


def looked_up(name: str, known: Collection[str]) -> tuple[str | None, str]:
    """Returns the known name that means the same as `name`, or is spelt like it, or None; and what
    to do without one, or "" if the name may be a typing mistake. The last part of a dotted name
    counts most."""
    by_use = sorted(known, key=use_of)
    by_leaf = {each.rpartition(".")[2]: each for each in reversed(by_use)}
    for key in _keys(name):
        if key in known and "." in key:
            return key, ""
        same = [ours for names in _SAME if key in names for ours in names]
        answers = [text for names, text in _ANSWERS if key in names]
        if not same and not answers and (key not in _NOT_OFFERED or key in by_leaf):
            continue
        answers = [text for text in answers if _mentioned(text) <= {*known}]
        of_this_command = [text for text in answers if "--" in text]
        near = (ours if ours in known else by_leaf.get(ours) for ours in [*same, key])
        if not of_this_command and (found := next(filter(None, near), None)):
            return found, ""
        return None, [*of_this_command, *answers, _LEAVE_OUT][0]
    if name.startswith("no_"):  # as vLLM turns a switch off
        return looked_up(name[3:], known)
    return _spelt_like(name, known, by_leaf), ""


def _mentioned(answer: str) -> set[str]:
    return {name for name, _ in _OPTION.findall(answer)}


def _keys(name: str) -> Iterator[str]:
    """Yields what the table may have for a name, the most particular first: its last parts, and
    sections as in `profiler.*`."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        spans = [parts[at : at + count - 1] for at in range(len(parts) - count + 1)]
        yield from map(".".join, [parts[-count:], *([*span, "*"] for span in spans)])


def _spelt_like(name: str, known: Collection[str], by_leaf: Mapping[str, str]) -> str | None:
    section, _, leaf = name.rpartition(".")
    if _HELD_OUT & set(re.split("[._]", name)):  # never the data or the options of training
        known = [each for each in known if each.startswith("eval.")] or known
        by_leaf = {each.rpartition(".")[2]: each for each in known}
    if leaf in by_leaf and section:
        sections = {each.rpartition(".")[0]: each for each in known if each.endswith(f".{leaf}")}
        near_section = get_close_matches(section, sections, 1, _NEARLY)
        return sections[near_section[0]] if near_section else by_leaf[leaf]
    near_leaf = get_close_matches(leaf, by_leaf, 1, _NEARLY)
    if near := get_close_matches(name, known, 1, _NEARLY) if "." in name or not near_leaf else []:
        return near[0]
    return by_leaf[near_leaf[0]] if near_leaf else None
