"""Suggests an option for an unknown name: a typing mistake, or a name from another project."""

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import yaml

from pat_jax.common.errors import UserError

_TABLE = yaml.safe_load(Path(__file__).parents[1].joinpath("option_names.yaml").read_text("utf-8"))
_SAME: Sequence[Sequence[str]] = [line.split() for line in _TABLE["same"]]
_INSTEAD: Mapping[str, str] = _TABLE["instead"]
_RETIRED: Mapping[str, Mapping[str, str | None]] = _TABLE["retired"]
_NOT_OFFERED = frozenset(_TABLE["not_offered"].split())

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
    leaf = name.rpartition(".")[2]
    if (instead := _INSTEAD.get(name) or _INSTEAD.get(leaf)) and name not in options:
        return UserError(f"option --{name}{where} is not offered: {instead}.")
    near = meant(name, options)
    if near is None and is_not_offered(name):
        return UserError(f"option --{name}{where} is not offered here: leave it out (see --help).")
    hint = f"did you mean --{near} (see --help)?" if near else "--help lists every option."
    return UserError(f"unknown option --{name}{where}: {hint}")


def is_not_offered(name: str) -> bool:
    """Returns whether the name is an option of other projects that pat_jax does not have. Such a
    name is not a typing mistake."""
    return name.rpartition(".")[2] in _NOT_OFFERED


def meant(name: str, known: Collection[str]) -> str | None:
    """Returns the known name that means the same as `name`, or is spelt like it, or None. The last
    part of a dotted name counts most."""
    section, _, leaf = name.rpartition(".")
    by_use = sorted(known, key=lambda each: _BY_USE.get(each.rpartition(".")[0], 0))
    by_leaf = {each.rpartition(".")[2]: each for each in reversed(by_use)}
    for written in dict.fromkeys((name, leaf)):  # some names mean something only in their section
        for names in _SAME:
            if written in names:
                for ours in names:
                    if ours != name and (found := ours if ours in known else by_leaf.get(ours)):
                        return found
    if is_not_offered(name):
        return None
    if _HELD_OUT & set(re.split("[._]", name)):  # never the data or the options of training
        known = [each for each in known if each.startswith("eval.")] or known
        by_leaf = {each.rpartition(".")[2]: each for each in known}
    if leaf in by_leaf and section:
        sections = {
            each.removesuffix(f".{leaf}"): each for each in known if each.endswith(f".{leaf}")
        }
        near_section = get_close_matches(section, sections, 1)
        return sections[near_section[0]] if near_section else by_leaf[leaf]
    near_leaf = get_close_matches(leaf, by_leaf, 1)
    if near := get_close_matches(name, known, 1) if "." in name or not near_leaf else []:
        return near[0]
    return by_leaf[near_leaf[0]] if near_leaf else None
