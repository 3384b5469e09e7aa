"""What is known of a text without a tokenizer."""

MAX_CHARACTERS = 256  # of a token; the longest of the usual vocabularies have half as many


def has_more_tokens(text: str, count: int) -> bool:
    """Whether that is sure without a tokenizer, which takes a second for a million characters."""
    return len(text) > MAX_CHARACTERS * count
