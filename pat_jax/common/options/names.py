"""Suggests an option for an unknown name: a typing mistake, or a name from another project."""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
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
_OPTION = re.compile(r"--(\w+(?:\.\w+)*)")
_NEARLY = 0.8  # the least similarity of a mistake of typing

# If several sections have an option of one name, the section with the least number is meant.
_BY_USE = {"": -5, "optimizer": -4, "rollout": -3, "algorithm": -2, "eval": -1}
_HELD_OUT = {"val", "valid", "validation", "test", "eval", "evaluation", "dev", "heldout"}


def of_today(name: str, text: str) -> str | None:
    """Returns the value that an option in a file has today: `text`, or what has replaced it since
    an older run wrote it. Returns None if the option is to be left out."""
    return _RETIRED.get(name, {}).get(text, text)


def unknown(name: str, options: Collection[str], where: str = "") -> UserError:
    """Returns the error for an unknown name, with a suggestion."""
    if any(known.startswith(f"{name}.") for known in options):
        return UserError(f"--{name}{where} is a section: write --{name}.OPTION (see --help).")
    near, answer = looked_up(name, options)
    if answer:
        return UserError(f"option --{name}{where} {answer}")
    hint = f"did you mean --{near} (see --help)?" if near else "--help all lists every option."
    return UserError(f"unknown option --{name}{where}: {hint}")


def no_option(word: str, options: Mapping[str, Option]) -> UserError:
    """Returns the error for a word that does not begin with --, such as verl's NAME=VALUE."""
    name, _, text = word.lstrip("+").partition("=")
    if not re.fullmatch(r"[\w.]+=.*", word.lstrip("+"), re.DOTALL):
        return UserError(f"unexpected {word!r}: options are written --name value.")
    ours = name if name in options else looked_up(name, options)[0]
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
    by_use = sorted(known, key=lambda each: _BY_USE.get(each.rpartition(".")[0], 0))
    by_leaf = {each.rpartition(".")[2]: each for each in reversed(by_use)}
    for key in _keys(name):
        if key in known and "." in key:
            return key, ""
        same = [ours for names in _SAME if key in names for ours in names]
        answers = [text for names, text in _ANSWERS if key in names]
        if not same and not answers and (key not in _NOT_OFFERED or key in by_leaf):
            continue
        answers = [text for text in answers if set(_OPTION.findall(text)) <= {*known}]
        of_this_command = [text for text in answers if "--" in text]
        near = (ours if ours in known else by_leaf.get(ours) for ours in [*same, key])
        if not of_this_command and (found := next(filter(None, near), None)):
            return found, ""
        return None, [*of_this_command, *answers, _LEAVE_OUT][0]
    return _spelt_like(name, known, by_leaf), ""


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
