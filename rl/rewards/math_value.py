r"""Compares the values of two mathematical answers, however they are written.

Knows words that leave an answer open or deny it. `math_verify` knows mathematics,
`math_notation.py` notation, `math_units.py` units. May run for ever (`9^{9^{9^{9}}}`), so use it
only in processes that can be killed.
"""

import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from pat_jax.rl.rewards.math_units import is_other_unit, is_percentage, split_attached, split_unit
from pat_jax.rl.text.math_notation import TEXT, plain, split_family, stated

# Words and signs that no answer may contain: they leave open which value is meant, or deny it.
_HEDGE = re.compile(
    r"(?<![a-zA-Z\\])(?:or|not|no|nor|neither|either|to|is|than|between|from|wrong|about|around"
    r"|ist|est|least|most|minus|negative|never|unless|except)"
    r"(?![a-zA-Z])|\\(?:pm|mp|ne|neq|not|lor|vee)(?![a-zA-Z])|\+/-|(?<=\d) ?\| ?(?=[-.\d])"
)
_SEVERAL = {"or", r"\lor", r"\vee", r"\pm"}  # allowed if the answer has several values
_OTHER_SCRIPT = re.compile(r"[\u0400-\u04ff\u3040-\u9fff\uac00-\ud7a3]")  # its words may deny one
_PAIR = re.compile(r"([\[(])[^\[\]()]*,[^\[\]()]*([\])])")
_ORDER = re.compile(r"[<>]|\\[lg]eq?(?:slant)?(?![a-zA-Z])")
_GREEK = r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|psi|omega)"
_ANGLE = r"m? ?\\(?:measured)?angle ?[A-Z]{1,3}"
_NAME = re.compile(
    rf"(?<![\w\\^{{])(?:([a-zA-Z]|{_GREEK}|{_ANGLE})|\\(?:math|bold|vec)[a-z]*\{{ ?([a-zA-Z]) ?\}})"
    " ?= ?"
)
_EQUALS = re.compile(r"(?<![<>!\\=])=(?!=)")
_SERIES = re.compile(r"[,+*-] ?\\ldots")
_SET_OF_ONE = re.compile(r"\\\{ ?(\([^()]*,[^()]*\)) ?\\\}")
_BASE = re.compile(r"(?<=\d)_\{?(\d+)")
_CHOICE = re.compile(r"[{ ]*\(?([A-Z])(?:\)|[.:](?=\s))")
_NAMED = re.compile(r"(?<!\\)(?<![a-zA-Z])[a-zA-Z]")
_DECIMALS = 6  # decimals that `math_verify` compares: 0.333333 is a third, 0.333 is not
_DIGITS = 15
_SMALL = 3  # with so many zeros after the point, six decimals are too few
_MOST_ZEROS = 10_000


def same_value(found: str, answer: str) -> bool:
    r"""Whether `found` states the value of `answer`, and no other value.

    >>> same_value(r"\dfrac12", "0.5"), same_value("2 or 3", "3"), same_value("x = -3.", "3")
    (True, False, False)
    >>> same_value("5 cm", "5"), same_value("5 cm", r"5\text{ m}")
    (True, False)
    """
    (found, unit), (answer, expected) = _measured(found), _measured(answer)
    if unit and expected and is_other_unit(unit, expected):
        return False
    if expected and not unit:
        found = split_attached(found, expected)
    elif unit and not expected:
        answer = split_attached(answer, unit)
    if is_percentage(unit) != is_percentage(expected):
        if _same(found, answer):
            return True
        found, answer = (rf"{found}\%", answer) if unit else (found, rf"{answer}\%")
        return _same(found, answer)
    found, answer = _families(found, answer)
    return _same(found, answer)


def _measured(text: str) -> tuple[str, str | None]:
    """Returns an answer's value in one notation, and its unit or None; `2/3` for `2/3 ≈ 0.67`."""
    exact, _, rounded = stated(plain(text)).partition(r"\approx")
    text = (exact if exact.strip() else rounded).strip().rstrip(".").strip()
    return (text, None) if _HEDGE.search(text) else split_unit(text)


def _families(found: str, answer: str) -> tuple[str, str]:
    """Returns two families of solutions, written with the same letter."""
    (found, letter), (answer, expected) = split_family(found), split_family(answer)
    if letter and expected and letter != expected:
        found = re.sub(rf"(?<![\\a-zA-Z]){letter}(?![a-zA-Z])", expected, found)
    return found, answer


def _same(found: str, answer: str) -> bool:
    pairs = [_SET_OF_ONE.sub(r"\1", one) for one in (found, answer)]
    if all(map(_PAIR.fullmatch, pairs)):  # a set of one pair is this pair
        found, answer = pairs
    if _as_text(found) == _as_text(answer):
        return bool(found)
    if _is_hedged(found, answer) or _is_other_pair(found, answer) or _is_other_base(found, answer):
        return False
    if re.fullmatch("[A-Z]", answer) and (choice := _CHOICE.match(re.sub(TEXT, "", found))):
        return choice[1] == answer
    if "=" not in answer and len(set(_NAME.findall(found))) == 1:
        return same_value(_NAME.sub("", found), answer)  # x = 2 or x = 3
    sides = _EQUALS.split(found)
    if len(sides) > 1 and "=" not in answer and "," not in found:
        return _states(sides, answer)
    if series := [one for one in (found, answer) if _SERIES.search(one)]:
        return len(series) == 2 and _same_terms(found, answer)
    return _verify(_parse(answer), _parse(found))


def _states(sides: Sequence[str], answer: str) -> bool:
    """Whether equations state the answer: `f(x) = 5` and `10/2 = 5` state 5, not so `6 = 5`."""
    *others, last = [side for side in sides if side.strip()] or [""]
    if not all(_NAMED.search(one) or same_value(last, one) for one in others):
        return False
    return same_value(last, answer)


def _same_terms(found: str, answer: str) -> bool:
    """Whether lists with an ellipsis agree term by term; one may have more terms than the other."""
    (first, last), (longer, other_last) = sorted(
        map(_terms, (found, answer)), key=lambda one: len(one[0])
    )
    if len(first) < len(longer):
        steps = [f"({second})-({one})" for one, second in itertools.pairwise(longer)]
        step = steps[0] if len(first) > 1 else "1"
        is_power = len(first) > 1 and "^" in "".join(last)  # 1, 2, ..., 2^n
        if not first or not (is_power or all(same_value(one, step) for one in steps)):
            return False
    return len(last) == len(other_last) and all(
        map(same_value, first + last, longer[: len(first)] + other_last)
    )


def _terms(written: str) -> list[list[str]]:
    """Returns the terms before an ellipsis and those after it."""
    first, _, last = written.removeprefix(r"\{").removesuffix(r"\}").partition(r"\ldots")
    return [[term for term in part.split(",") if term.strip()] for part in (first, last)]


def _as_text(written: str) -> str:
    """Returns the text for comparison as a plain text: for words, choices or equal notation."""
    words = re.sub(rf"{TEXT}\{{([^{{}}]*)\}}", r"\1", written)
    words = re.sub(r"(?<!\d)\s|\s(?!\d)", "", words)
    is_word = re.fullmatch(r"\(?[a-zA-Z]+\)?", words)
    return words.strip("()").lower() if is_word else words


def _is_hedged(found: str, answer: str) -> bool:
    if _ORDER.search(found) and not _ORDER.search(answer) and not _PAIR.search(answer):
        return True  # `x > 5` is not 5
    if set(_OTHER_SCRIPT.findall(found)) - set(_OTHER_SCRIPT.findall(answer)):
        return True
    hedges = set(_HEDGE.findall(found)) - set(_HEDGE.findall(answer))
    return bool(hedges - _SEVERAL if "," in answer else hedges)


def _is_other_pair(found: str, answer: str) -> bool:
    """Whether two pairs have different brackets: an open interval is not a closed one."""
    one, other = _PAIR.fullmatch(found), _PAIR.fullmatch(answer)
    return bool(one and other and one.groups() != other.groups())


def _is_other_base(found: str, answer: str) -> bool:
    one, other = _BASE.findall(found), _BASE.findall(answer)
    return bool(one and other) and one != other


def _verify(answer: list, found: list) -> bool:
    """Compares by `math_verify`. Small numbers are compared with as many more decimals as zeros."""
    zeros = max(map(_zeros, answer + found), default=0)
    more = min(zeros, _MOST_ZEROS) if zeros >= _SMALL else 0
    verify = math_verify()[1]
    return verify(
        answer,
        found,
        float_rounding=_DECIMALS + more,
        numeric_precision=_DIGITS + more,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )


def _zeros(parsed: object) -> int:
    """Returns the zeros after the point of a value's smallest non-zero number: 3 for 0.00012."""
    sizes = [Decimal(str(abs(number.evalf(3)))) for number in _numbers(parsed)]
    return max((-size.adjusted() - 1 for size in sizes if size.is_finite() and size), default=0)


def _numbers(parsed: Any) -> Iterator[Any]:
    """Yields the largest subexpressions of a SymPy value that are real numbers."""
    if getattr(parsed, "is_number", False) and parsed.is_real:
        yield parsed
    else:
        is_matrix = hasattr(parsed, "flat")
        for part in parsed.flat() if is_matrix else getattr(parsed, "args", ()):
            yield from _numbers(part)


@functools.lru_cache(maxsize=1024)  # a group shares its answer
def _parse(written: str) -> list:
    parse, _ = math_verify()
    return parse(rf"\boxed{{{written}}}", _notation(), parsing_timeout=None)


@functools.cache
def _notation() -> list:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    latex = LatexExtractionConfig()
    # Its units have letters that are names of numbers: `3ab` would be 3.
    without_units = replace(latex.normalization_config, units=False)
    return [replace(latex, normalization_config=without_units), ExprExtractionConfig()]


@functools.cache
def math_verify() -> tuple[Callable, Callable]:
    """Returns `parse` and `verify`, to be used without their time limits.

    The limits need signals in the main thread. Here the worker process is killed instead, so the
    warning about missing limits is silenced.
    """
    from math_verify import parse, verify  # two seconds to import, in workers only

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify
