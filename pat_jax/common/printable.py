"""Escapes control characters in text from others, so that a terminal does not obey them.

Imports nothing of the project.
"""

import re

# Control characters except for tab and line feed, those that change the direction of text, line
# separators that terminals do not know, and half surrogate pairs, which no file takes.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Returns the text with control characters replaced by escapes such as `\x1b`."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
