r"""Rewrites mathematical answers, from the many notations in use, in a single one.

Knows notation: signs, spaces, roots, decimals that repeat, intervals, families of solutions. Does
not know values (`math_value.py`) nor units (`math_units.py`). Reads each text once.
"""

import re

TEXT = r"\\(?:(?:text|math)(?:bf|it|normal|rm|sf)|text|mbox|boldsymbol|bm|operatorname)"
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–—－", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f", r"\,"),
        **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/"},
        **{"≈": r"\approx ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty "},
        **{"π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda "},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^{\circ}"},
        **{"±": r"\pm ", "∓": r"\mp "},
        **{"²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
        **{"％": "%", "，": ",", "（": "(", "）": ")", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}"},
        **{"√": r"\sqrt", "∛": r"\sqrt[3]", "…": "...", "∖": r"\setminus "},
        **{"∠": r"\angle "},
        **dict(zip("０１２３４５６７８９", "0123456789", strict=True)),
    }
)
_ROW = "\ue000"  # ends a row of a matrix while other rules look at backslashes
_ROWS = re.compile(r"\s*\\\\\*?\s*(?:\[-?[\d.]+\s*[a-z]{2}\])?\s*")
_EMPTY_ROW = re.compile(rf"{_ROW}\s*(?=\\end\{{)")
_DOUBLE_ESCAPE = re.compile(r"\\\\(?=[a-zA-Z,;!% ])")
_FUNCTION = r"sqrt|ln|log|sin|cos|tan|pi"  # not sec, a unit
DEGREES = r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-z]))"


def _improper(mixed: re.Match[str]) -> str:
    """Returns a mixed number as a fraction: 11/2 for 5 1/2. Products, as 5 3/2, do not change."""
    whole, numerator, denominator = map(int, mixed.groups())
    if numerator >= denominator:
        return mixed[0]
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


_SAME = [  # replacements, in this order
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (rf"({TEXT}|\\mathbb)\s+\{{", r"\1{"),
        (rf"(?<![a-zA-Z\\])({_FUNCTION})(?![a-zA-Z])", r"\\\1 "),
        (r"(?<=[\w)}])\*\*(?=[\w({-])", "^"),
        (rf"{TEXT}\{{\s*([-+]?[\d.,/]+(?:\\?%)?)\s*\}}", r"\1"),  # bold numbers
        (r"\\[()\[\]]|(?<!\\)\$|\*\*|\\displaystyle(?![a-z])", ""),
        (r"\{,\}|,\s*\\!", ","),
        (r"\\(?:[,;: ]|quad|qquad|thinspace)|~", " "),
        (r"\\!", ""),
        (r"\\[dtc]frac(?![a-z])", r"\\frac"),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-z])", ""),
        (r"(?<=\d)\s*\n\s*(?=[-+\d])", ", "),  # numbers on lines of their own are several
        (r"\s+", " "),
        (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,/])", lambda number: number[0].replace(" ", "")),
        (r"\\varnothing(?![a-z])", r"\\emptyset"),
        (r"\\[lr]brace(?![a-z])", lambda one: r"\{" if one[0] == r"\lbrace" else r"\}"),
        (r"\\not ?=", r"\\ne "),
        (r"\\mathbb ?([A-Z])(?![a-z])", r"\\mathbb{\1}"),
        (r"\{(\\(?:overline|bar|dot) ?\{ ?\d+ ?\})\}", r"\1"),
        (r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d+)(?![\w.])", r"\1\\times 10^{\2}"),
        (r"(?<=\d) ?[xX*] ?(?=10 ?\^)", r"\\times "),
        (r"\^ ?([-+]\d+)", r"^{\1}"),
        (r"(\\sqrt ?(?:\[\w+\])?) ?(\d+|[a-zA-Z])(?![\d}])", r"\1{\2}"),
        (r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac ?(\d) ?\{", r"\\frac{\1}{"),
        (r"(\\frac ?\{\d+\}) ?(\d)", r"\1{\2}"),
        (r"(?<=\d) (\d+) ?/ ?(\d+)(?![\d.])", r" \\frac{\1}{\2}"),
        (r"(?<![\w.}/^])(\d+) ?\\frac ?\{(\d+)\} ?\{(\d+)\}", _improper),
    ]
]
_LISTED_DOTS = re.compile(
    r"(?:(?<=[,+*-])|(?<=[,+*-] ))(?:\.{3,}|\\(?:[lcvh]dots|dots[bcimo]?)(?![a-z])) ?"
)
_DOTS = r"(?:\.\.\.|\\[lc]?dots)"
_KIND = (
    r"(?:(?:final|correct|total|only|smallest|largest|least|greatest|minimum|maximum|expected"
    r"|desired|such|possible|positive|distinct|different) )*"
)
_QUANTITY = (
    r"(?:answer|result|solution|total|sum|product|difference|ratio|area|volume|perimeter|length"
    r"|width|height|radius|diameter|distance|speed|time|age|angle|slope|cost|price|profit|average"
    r"|mean|median|probability|remainder|number|amount|percentage|option|choice)s?"
)
_OF = rf" of (?:the {_KIND}[a-z]+|{_KIND}[a-z]+s|(?:[a-z]+ )?(?-i:[A-Z]{{1,4}}))"
_STATED = re.compile(  # words before a value that neither deny nor change it
    r"[#*\s]*(?:(?:so|thus|therefore|hence|exactly|there (?:is|are)|it is)\b[ ,:]*)*"
    rf"(?:(?:(?:the )?{_KIND}(?:value(?: of (?:the expression|\\[a-z]+|[a-z]))?|{_QUANTITY}(?:{_OF})?)"
    r"(?: (?:is|are|equals)(?![a-z])(?: equal to)?(?: ?:)?| ?[:：])"
    r"|(?:答案|答え?|정답|ответ) ?(?:[是为為は은]|[:：])|[a-z] is(?= [^a-z])) *)?(?=\S)",
    re.IGNORECASE,
)
_REPEATING = [
    re.compile(rf"(?<![\d.])(?P<whole>\d*)\.{end}(?![\d.}}])")
    for end in (
        r"(?P<first>\d*)\\dot ?\{?(?P<again>\d)\}?(?P<middle>\d{0,40})\\dot ?\{?(?P<last>\d)\}?",
        r"(?P<first>\d*)\\(?:overline|bar|dot) ?\{? ?(?P<again>\d{1,40}) ?\}?",
        r"(?P<first>\d*)\((?P<again>\d{1,40})\)",
        rf"(?P<first>\d*?)(?P<again>\d)(?P=again){{2,}} ?{_DOTS}",
        rf"(?P<first>\d*?)(?P<again>\d{{2,20}}?)(?P=again)+ ?{_DOTS}",
    )
]
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_ANGLE = re.compile(rf"(\d+(?:\.\d+)?) ?{DEGREES}")
_ROOT = re.compile(r"\\sqrt ?(?:\[\w+\])? ?\(")
_ISO_INTERVAL = re.compile(r"([\[\]])([^\[\]()]*[,;][^\[\]()]*)([\[\]])")
_REALS = r"\\mathbb\{R\}"
_SET = re.compile(r"\\\{(?P<of>[^:|]*?) ?(?::|\||\\mid(?![a-z])) ?(?P<where>.*)\\\}")
_ANY_REAL = re.compile(rf" ?[a-zA-Z] ?(?:\\in ?{_REALS})? ?")
_WITHOUT = re.compile(rf"({_REALS}) ?(?:\\setminus|\\backslash|-) ?\\\{{(.*)\\\}}")
_UNEQUAL = re.compile(
    rf"(?:([a-zA-Z]) ?\\in ?{_REALS} ?[,:;|]? ?)?(?P<name>[a-zA-Z]) ?\\neq? ?(?P<values>[^<>=]+)"
)
_AND = re.compile(rf" ?(?:[,;]|{TEXT}\{{ ?and ?\}}|\band\b|\\(?:land|wedge)(?![a-z])) ?")
_INTEGERS = r"\\in ?(?:\\math(?:bb|bf|rm) ?)?\{?Z\}?|(?:is |be )?an(?:y)? integer"
_FAMILY = re.compile(
    r"[,;]? ?\(?(?:where |for (?:(?:any|all|every|some|each) )?|with )?"
    rf"(?:(?:integers?|an integer) (?P<after>[a-z])|(?P<before>[a-z]) ?(?:{_INTEGERS}))\)?$"
)
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LIST = re.compile(r"[(\[]|\\\{")  # (1,234) may be a pair


def plain(text: str) -> str:
    r"""Returns the answer in a normal form: one notation for fractions, intervals, roots and the
    like.

    >>> plain("11 5/6"), plain(r"0.1\overline{6}"), plain("]0,1]"), plain(r"4\sqrt(2)")
    ('\\frac{71}{6}', '\\frac{15}{90}', '(0,1]', '4\\sqrt{2}')
    """
    text = text.translate(_SIGNS)
    has_rows = r"\begin" in text
    if has_rows:
        text = _EMPTY_ROW.sub("", _ROWS.sub(_ROW, text))
    else:
        text = _DOUBLE_ESCAPE.sub(r"\\", text)
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    for pattern in _REPEATING:
        text = pattern.sub(_fraction, text)
    if _TRIGONOMETRIC.search(text):
        text = _ANGLE.sub(r"{\\frac{\1\\pi}{180}}", text)
    text = _listed(text.strip())
    text = _ISO_INTERVAL.sub(_interval, _braced_roots(text))
    if not _LIST.search(text):
        text = without_grouping(text)
    text = _LISTED_DOTS.sub(r"\\ldots ", text)
    return _real_set(text).replace(_ROW, r" \\ ").strip().rstrip(".").strip()


def without_grouping(text: str) -> str:
    """Returns the text without commas between groups of three digits: `1234` for `1,234`."""
    return _GROUPED.sub(lambda number: number[0].replace(",", ""), text)


def stated(text: str) -> str:
    r"""Returns the text without words that lead to its value; other texts do not change.

    >>> stated(r"\text{The area is } 42"), stated("Thus, x = 42"), stated("Area: 42"), stated("5 m")
    ('42', 'x = 42', '42', '5 m')
    """
    words = re.sub(rf"{TEXT}\{{([^{{}}]*)\}}", r" \1 ", text)
    words = re.sub(" +", " ", words).replace(" ^", "^").strip()
    return words[found.end() :] if (found := _STATED.match(words)) and found.end() else text


def split_family(text: str) -> tuple[str, str | None]:
    r"""Splits an answer from a note that a letter stands for any integer. Returns the answer, and
    the letter or None without such a note.

    >>> split_family(r"2k\pi, k \in \mathbb{Z}")
    ('2k\\pi', 'k')
    """
    found = _FAMILY.search(re.sub(rf"{TEXT}\{{([^{{}}]*)\}}", r"\1", text).replace("  ", " "))
    if not found:
        return text, None
    letter = found["after"] or found["before"]
    return found.string[: found.start()].rstrip(" ,;"), letter


def _fraction(number: re.Match[str]) -> str:
    """Returns the fraction of a decimal whose last digits repeat for ever."""
    groups = number.groupdict()
    again = groups["again"] + (groups.get("middle") or "") + (groups.get("last") or "")
    before = number["whole"] + number["first"]
    numerator = int(before + again) - int(before or 0)
    denominator = (10 ** len(again) - 1) * 10 ** len(number["first"])
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _braced_roots(text: str) -> str:
    r"""Returns the text with `\sqrt{x}` for `\sqrt(x)`; unclosed parentheses do not change."""
    closing = {}
    opened = []
    for at, sign in enumerate(text):
        if sign == "(":
            opened.append(at)
        elif sign == ")" and opened:
            closing[opened.pop()] = at
    signs = list(text)
    for root in _ROOT.finditer(text):
        if (first := root.end() - 1) in closing:
            signs[first] = "{"
            signs[closing[first]] = "}"
    return "".join(signs)


def _listed(text: str) -> str:
    """Returns the text with commas for semicolons, and a set as its condition or family."""
    if ";" in text and "," not in text:
        text = text.replace(";", ",")
    if not (named := _SET.fullmatch(text)):
        return text
    if _ANY_REAL.fullmatch(named["of"]):
        return named["where"]
    return f"{named['of']}, {named['where']}" if _FAMILY.fullmatch(named["where"]) else text


def _interval(found: re.Match[str]) -> str:
    """Returns `(0,1)` for `]0,1[`, which is an open interval in ISO 31-11."""
    opening, ends, closing = found.groups()
    return ("(" if opening == "]" else "[") + ends + (")" if closing == "[" else "]")


def _real_set(text: str) -> str:
    r"""Returns the set of real numbers without 2 for `x \ne 2`."""
    text = _WITHOUT.sub(r"\1\\setminus\\{\2\\}", text)
    if not (unequal := _UNEQUAL.fullmatch(text)):
        return text
    name = unequal["name"]
    values = []
    for value in _AND.split(unequal["values"]):
        value = re.sub(rf"^{name} ?\\neq? ?", "", value)
        values += [value[3:], f"-{value[3:]}"] if value.startswith(r"\pm") else [value]
    return rf"\mathbb{{R}}\setminus\{{{','.join(values)}\}}"
