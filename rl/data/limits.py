"""Which limit on tokens would leave out few.

Knows lengths. Does not know what they are of, nor what the option of the limit is called.
"""

from collections.abc import Sequence

A_LIMIT = "a limit of"  # what a limit is called where it has no option


def keeps_most(num_kept: int, too_long: Sequence[int | None], option: str) -> str:
    """The smallest limit that keeps 99 %, in words to follow those about the present one.

    Empty where that one does, or where too many lengths are not known.

    Args:
      too_long: lengths of what is left out; None is taken as longer than any other.
    """
    known = sorted(length for length in too_long if length is not None)
    place = len(too_long) - 1 - (num_kept + len(too_long)) // 100
    return f" ({option} {known[place]} keeps 99 %)" if 0 <= place < len(known) else ""
