r"""Splits the unit from the end of an answer, in any of its spellings.

Knows names of units. Does not convert: `500 cm` is not `5 m`.
"""

import re

from pat_jax.rl.text.math_notation import DEGREES, TEXT

# The name of each unit, and other ways to write it.
_UNITS = """\
mm millimeter millimetre; cm centimeter centimetre; dm decimeter decimetre; m meter metre
km kilometer kilometre; in inch inche; ft foot feet; yd yard; mi mile
mg milligram; g gram gm; kg kilogram kilo; t ton tonne; oz ounce; lb pound £ gbp
ml milliliter millilitre; l liter litre; gal gallon
s sec second; min minute; h hr hour; day; week wk; month; year yr; am a.m; pm p.m
mi/h mph; km/h kmh kph
degree deg; degree_c; degree_f; radian rad
dollar $ usd buck; cent ¢; euro € eur; rupee ₹ rs inr; yen ¥ jpy
n newton; j joule; w watt; hz hertz; percent % pct"""
_KNOWN = {word: words[0] for words in map(str.split, re.split("[;\n]", _UNITS)) for word in words}
# Words that name no unit: 5 units are 5.
_NO_UNIT = {"unit", "unit^2", "unit^3"}
_POWER = r"(?:\^ ?\{? ?[23] ?\}?)?"
_SHORT = r"[cdkm]?m|[km]?g|ft|in|yd|mi|lbs?|oz|hrs?|h|min|sec|s|m?[lL]|mph|sq\.?|cu\.?|[ap]\.?m\.?"
_WORDS = rf"(?:(?:{_SHORT})(?![a-zA-Z])|[a-zA-Z]{{3,}}){_POWER}"
_IN_TEXT = rf"{TEXT}\{{[^{{}}\d]*\}}{_POWER}"
_FRACTION = rf"\\frac ?\{{ ?{_IN_TEXT} ?\}} ?\{{ ?{_IN_TEXT} ?\}}"
_ENDING = re.compile(
    rf"(?P<value>.*(?:[\d)}}\]]|\\pi))(?P<unit> ?{DEGREES}(?: ?(?:{TEXT} ?\{{ ?)?[CF](?: ?\}})?)?"
    rf"| ?\\?%| ?[€个個元円人개명]| ?{_FRACTION}| ?{_IN_TEXT}(?: ?/ ?{_IN_TEXT})?"
    rf"| {_WORDS}(?:(?: ?/ ?| ){_WORDS})*)"
)
_ATTACHED = re.compile(rf"(?P<value>.*\d)(?P<unit>(?:{_SHORT})(?:/(?:{_SHORT}))?{_POWER})")
_CURRENCY = re.compile(r"(?P<sign>-?)(?P<unit>\\\$|[£€¥₹]|Rs\.?|USD) ?(?P<value>[-\d.].*)")
_NO_WORD = re.compile(rf"{TEXT}|\\frac|[{{}}\\]")


def split_unit(plain: str) -> tuple[str, str | None]:
    r"""Returns the value, and the name of the unit or None.

    >>> split_unit(r"5\text{ sq. cm}"), split_unit("8 boys"), split_unit("5x"), split_unit("6 units")
    (('5', 'cm^2'), ('8', 'boy'), ('5x', None), ('6', None))
    """
    if found := _CURRENCY.fullmatch(plain):
        return found["sign"] + found["value"], _name(found["unit"])
    for sign, name in ((DEGREES, "degree"), (r"\\?%", "percent")):
        if len(re.findall(sign, plain)) > 1:
            return re.sub(rf" ?{sign}", "", plain), name  # from each item of a list
    found = _ENDING.fullmatch(plain)
    if not found or not (unit := found["unit"].strip()):
        return plain, None
    return found["value"].strip(), _name(unit)


def split_attached(plain: str, unit: str) -> str:
    """Returns `5` for `5cm` if `unit`, the other answer's, is `cm`; else `5cm` stays a product."""
    found = _ATTACHED.fullmatch(plain)
    return found["value"] if found and _name(found["unit"]) == unit else plain


def is_other_unit(unit: str, other: str) -> bool:
    """Whether two units differ. Measures must be the same; other things (paper clips) need one word
    in common."""
    measures = [[word for word in name.split() if _is_measure(word)] for name in (unit, other)]
    if any(measures):
        return measures[0] != measures[1]
    return not set(unit.split()) & set(other.split())


def is_percentage(unit: str | None) -> bool:
    return "percent" in (unit or "").split()


def _is_measure(word: str) -> bool:
    return all(part.partition("^")[0] in _KNOWN for part in word.split("/"))


def _name(unit: str) -> str | None:
    text = re.sub(DEGREES, " degree ", unit).replace(r"\$", "$")
    text = re.sub(rf"(?<=\}}) ?(?=\{{)|(?<=\}})(?={TEXT})", "/", text) if r"\frac" in text else text
    text = _NO_WORD.sub("", text).lower().replace(" per ", "/")
    text = re.sub(r"\b(celsius|fahrenheit)\b", lambda scale: scale[0][0], text)
    text = re.sub(r"\b(?:square|sq)\.? (?:of )?([a-z]+)", r"\1^2", text)
    text = re.sub(r"\b(?:cubic|cu)\.? ([a-z]+)", r"\1^3", text)
    text = re.sub(r"\bin (?=[a-z])", "", text)  # `in` of `five in all` is not inches
    text = re.sub(r" ?([/^]) ?", r"\1", text)
    name = " ".join("/".join(map(_singular, word.split("/"))) for word in text.strip(" .").split())
    name = re.sub(r"\bdegree ([cf])\b", r"degree_\1", name)
    name = "" if name in _NO_UNIT else _KNOWN.get(name, name)
    return name or None


def _singular(word: str) -> str:
    word, power, exponent = word.strip(".,").partition("^")
    if word not in _KNOWN and len(word) > 2 and word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    return _KNOWN.get(word, word) + power + exponent
