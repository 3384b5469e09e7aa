r"""Whether two mathematical answers have the same value, however they are written.

Knows notation; `math_verify` knows mathematics. May take for ever (`9^{9^{9^{9}}}`): for
processes that can be killed.
"""

import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–—－", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f", r"\,"),
        **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/"},
        **{
            "≈": r"\approx ",
            "≤": r"\le ",
            "≥": r"\ge ",
            "≠": r"\ne ",
            "±": r"\pm ",
            "∓": r"\mp ",
            "∞": r"\infty ",
        },
        **{"π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda "},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^{\circ}"},
        **{"²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
        **{"％": "%", "，": ",", "（": "(", "）": ")"},
    }
)
_TEXT = r"\\(?:(?:text|math)(?:bf|it|normal|rm|sf)|text|mbox|boldsymbol|bm)"
_SAME = [  # one way of writing for many, in this order
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
        (rf"{_TEXT}\{{\s*([-+]?[\d.,/]+)\s*\}}", r"\1"),  # bold numbers
        (r"\\[()\[\]]|(?<!\\)\$|\*\*|\\displaystyle(?![a-z])", ""),
        (r"\{,\}|,\s*\\!", ","),
        (r"\\(?:[,;: ]|quad|qquad|thinspace)|~", " "),
        (r"\\!", ""),
        (r"\\[dtc]frac(?![a-z])", r"\\frac"),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-z])", ""),
        (r"(?<=\d)\s*\n\s*(?=[-+\d])", ", "),  # numbers on lines of their own are several
        (r"\s+", " "),
        (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])", lambda number: number[0].replace(" ", "")),
    ]
]
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LIST = re.compile(r"[(\[]|\\\{")  # (1,234) may be a pair
_UNIT = re.compile(
    rf"(?<=[\d}}])(?:\s*{_TEXT}\{{[^{{}}]*\}}(?:\^\{{?\d\}}?)?"
    r"|\s(?:[a-z]{3,}[a-z ]*|[cmk]?m|k?g|ft|in|lbs?|h))$"
)
# What an answer is not with: they leave open which value is meant, or deny it.
_HEDGE = re.compile(
    r"(?<![a-zA-Z\\])(?:or|not|no|nor|neither|either|to|is|than|between|from|wrong|about|around)"
    r"(?![a-zA-Z])|\\(?:pm|mp|ne|neq|not|lor|vee)(?![a-zA-Z])|\+/-|(?<=\d) ?\| ?(?=[-.\d])"
)
_SEVERAL = {"or", r"\lor", r"\vee", r"\pm"}  # right where the answer has several values
_PAIR = re.compile(r"([\[(])[^\[\]()]*,[^\[\]()]*([\])])")
_ORDER = re.compile(r"[<>]|\\[lg]eq?(?:slant)?(?![a-zA-Z])")
_NAME = re.compile(r"(?<![\w\\^{])([a-zA-Z]) ?= ?")
_EQUALS = re.compile(r"(?<![<>!\\=])=(?!=)")
_BASE = re.compile(r"(?<=\d)_\{?(\d+)")
_CHOICE = re.compile(r"[{ ]*\(?([A-Z])(?:\)|[.:](?=\s))")
_NAMED = re.compile(r"(?<!\\)(?<![a-zA-Z])[a-zA-Z]")


def same_value(found: str, answer: str) -> bool:
    r"""Whether what was found says the value of `answer`, and no other beside it.

    >>> same_value(r"\dfrac12", "0.5"), same_value("2 or 3", "3"), same_value("x = -3.", "3")
    (True, False, False)
    """
    found, answer = _plain(found), _plain(answer)
    if _as_text(found) == _as_text(answer):
        return bool(found)
    if _is_hedged(found, answer) or _is_other_pair(found, answer) or _is_other_base(found, answer):
        return False
    if re.fullmatch("[A-Z]", answer) and (choice := _CHOICE.match(re.sub(_TEXT, "", found))):
        return choice[1] == answer
    if "=" not in answer and len(set(_NAME.findall(found))) == 1:
        return same_value(_NAME.sub("", found), answer)  # x = 2 or x = 3
    sides = _EQUALS.split(found)
    if len(sides) > 1 and "=" not in answer and "," not in found:
        return _says(sides, answer)
    verify = math_verify()[1]
    parsed = _parse(answer), _parse(found)
    return verify(*parsed, allow_set_relation_comp=True, timeout_seconds=None)


def _says(sides: Sequence[str], answer: str) -> bool:
    """`f(x) = 5` says 5, and so does `10/2 = 5`, but not `6 = 5`."""
    *others, last = [side for side in sides if side.strip()] or [""]
    if not all(_NAMED.search(one) or same_value(last, one) for one in others):
        return False
    return same_value(last, answer)


def _plain(text: str) -> str:
    """The same in one way of writing."""
    text = text.translate(_SIGNS)
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    if not _LIST.search(text):
        text = _GROUPED.sub(lambda number: number[0].replace(",", ""), text)
    exact, _, rounded = text.partition(r"\approx")
    text = (exact if exact.strip() else rounded).strip().rstrip(".").strip()
    return text if _HEDGE.search(text) else _UNIT.sub("", text)


def _as_text(plain: str) -> str:
    """What is compared before any mathematics: weekdays, letters of choices, the same signs."""
    words = re.sub(rf"{_TEXT}|[{{}}]|(?<!\d)\s|\s(?!\d)", "", plain)
    is_word = re.fullmatch(r"\(?[a-zA-Z]+\)?", words)
    return words.strip("()").lower() if is_word else words


def _is_hedged(found: str, answer: str) -> bool:
    if _ORDER.search(found) and not _ORDER.search(answer) and not _PAIR.search(answer):
        return True  # `x > 5` is not 5
    hedges = set(_HEDGE.findall(found)) - set(_HEDGE.findall(answer))
    return bool(hedges - _SEVERAL if "," in answer else hedges)


def _is_other_pair(found: str, answer: str) -> bool:
    """An open interval is not a closed one."""
    one, other = _PAIR.fullmatch(found), _PAIR.fullmatch(answer)
    return bool(one and other and one.groups() != other.groups())


def _is_other_base(found: str, answer: str) -> bool:
    one, other = _BASE.findall(found), _BASE.findall(answer)
    return bool(one and other) and one != other


@functools.lru_cache(maxsize=1024)  # a group shares its answer
def _parse(plain: str) -> list:
    parse, _ = math_verify()
    return parse(rf"\boxed{{{plain}}}", _notation(), parsing_timeout=None)


@functools.cache
def _notation() -> list:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    latex = LatexExtractionConfig()
    # Its units have letters that are names of numbers: `3ab` would be 3.
    without_units = replace(latex.normalization_config, units=False)
    return [replace(latex, normalization_config=without_units), ExprExtractionConfig()]


@functools.cache
def math_verify() -> tuple[Callable, Callable]:
    """`parse` and `verify`, used without their time limits, which need the main thread's signals.

    The worker process that this runs in is killed instead, so its warning about that is silenced.
    """
    from math_verify import parse, verify  # two seconds to import, in workers only

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify
