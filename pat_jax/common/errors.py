"""UserError, the one exception whose message is for the user, and helpers for its text."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Control characters except for tab and line feed, those that change the direction of text, line
# separators that terminals do not know, and half surrogate pairs, which no file takes.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Returns the text with control characters replaced by escapes such as `\x1b`."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


MOST_CHARACTERS = 1200  # of an error's sentence
_LONG_WORD = re.compile(r"\S{301,}")  # longer than most paths


class UserError(Exception):
    """A mistake in the input: one sentence saying what, where, what was expected, what to do.

    Commands print it after `error:` and exit with code 2; nothing has been written by then. A
    notebook shows the same line. It is one line of at most `MOST_CHARACTERS`, whatever it quotes.
    """

    def __init__(self, sentence: str):
        super().__init__(in_one_line(sentence))

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return [f"error: {printable(str(self))}"]


class UserErrors(UserError):
    """Several mistakes of one kind: a line about all, and below it the sentence of each."""

    def __init__(self, line: str, errors: Sequence[UserError]):
        super().__init__(line)
        self.errors = errors

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *map(str, self.errors)])


@contextmanager
def together(line: str) -> Iterator[list[UserError]]:
    """Gives a list for errors. If there are any at the end, raises one error of all of them, whose
    first line is their number and `line`."""
    errors: list[UserError] = []
    yield errors
    if len(errors) > 1:
        raise UserErrors(f"{len(errors)} {line}", errors)
    if errors:
        raise errors[0]


def shown(value: object) -> str:
    """Returns the repr of a value, shortened to fit into a sentence."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    except ValueError:  # an integer of more digits than Python writes
        return "an integer of thousands of digits"
    return shortened(text)


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:160]}... ({len(text):,} characters)"


def in_one_line(text: str) -> str:
    """Returns the text in one line. A long text is cut in the middle."""
    text = _LONG_WORD.sub(lambda word: _middle_cut(word[0], 240), text)
    return _middle_cut(re.sub(r"\s*\n\s*", " ", text), MOST_CHARACTERS - 100)


def _middle_cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end]}[... {len(text) - most:,} characters ...]{text[-end:]}"
