"""Limits on tokens: which would leave out few, and what surely exceeds one.

Knows lengths. Does not know tokenizers, nor what the option of the limit is called.
"""

from collections.abc import Sequence

A_LIMIT = "a limit of"  # what a limit is called where it has no option
MOST_CHARACTERS = 256  # of a token; the longest of the usual vocabularies have half as many


def has_more_tokens(text: str, count: int) -> bool:
    """Whether that is sure without a tokenizer, which takes a second for a million characters."""
    return len(text) > MOST_CHARACTERS * count


def keeps_most(num_kept: int, too_long: Sequence[int | None], option: str) -> str:
    """The smallest limit that keeps 99 %, in words to follow those about the present one.

    Empty where that one does, or where too many lengths are not known.

    Args:
      too_long: lengths of what is left out; None is taken as longer than any other.
    """
    known = sorted(length for length in too_long if length is not None)
    place = len(too_long) - 1 - (num_kept + len(too_long)) // 100
    return f" ({option} {known[place]} keeps 99 %)" if 0 <= place < len(known) else ""
