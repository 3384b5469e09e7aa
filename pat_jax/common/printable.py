"""Text of somebody else: what would steer the terminal is shown, not obeyed.

Imports nothing of the project.
"""

import re

# Control characters except for tab and line feed, what changes the direction of text, line
# separators that are none to a terminal, and halves of characters, which no file takes.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""With escapes such as `\x1b` in the place of these; of a text without any the text itself."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
