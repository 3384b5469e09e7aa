"""Limits on numbers of tokens: suggests a limit, and finds texts that surely exceed one.

Knows lengths. Does not know tokenizers.
"""

from collections.abc import Sequence, Sized

A_LIMIT = "a limit of"  # the name of a limit without an option
MOST_CHARACTERS = 256  # most in a token; the longest of usual vocabularies have half as many


def has_more_tokens(text: str, count: int) -> bool:
    """Whether the text surely has more than `count` tokens, without tokenizing it.

    A tokenizer takes a second for a million characters."""
    return len(text) > MOST_CHARACTERS * count


def kept(train: Sized, heldout: Sized) -> str:
    """Returns how many are learned from and how many held out, in words."""
    counts = {"to learn from": len(train), "held out": len(heldout)}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "none"


def keeps_most(num_kept: int, too_long: Sequence[int | None], option: str) -> str:
    """Returns a hint for messages: the smallest limit that keeps 99 %. Empty if the present limit,
    which keeps `num_kept`, is as good, or if too many lengths are unknown (None)."""
    known = sorted(length for length in too_long if length is not None)
    place = len(too_long) - 1 - (num_kept + len(too_long)) // 100
    return f" ({option} {known[place]} keeps 99 %)" if 0 <= place < len(known) else ""
