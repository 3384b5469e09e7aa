"""What is known of a text without a tokenizer."""

from collections.abc import Mapping

MAX_CHARACTERS = 256  # of a token; the longest of the usual vocabularies have half as many


def has_more_tokens(text: str, count: int) -> bool:
    """Whether that is sure without a tokenizer, which takes a second for a million characters."""
    return len(text) > MAX_CHARACTERS * count


def has_lone_surrogate(value: object) -> bool:
    """Whether a text, at any depth, has half of a character: JSON can say it, no tokenizer reads it."""
    if isinstance(value, Mapping):
        return any(has_lone_surrogate(pair) for pair in value.items())
    if isinstance(value, list | tuple):
        return any(map(has_lone_surrogate, value))
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return True
    return False
