"""Which problems are held out: a property of the problem's text and of nothing else.

No seed, file order or run enters, so what one run trained on no other run evaluates on (a run that
never evaluates holds nothing out).
"""

import hashlib
from enum import StrEnum


class Subset(StrEnum):
    TRAIN = "train"
    HELDOUT = "heldout"


def subset_of(text: str, heldout_share: float) -> Subset:
    """Held out if the text's 64-bit hash lies in the lowest `heldout_share` of all hashes."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    is_heldout = int.from_bytes(digest, "big") < heldout_share * 2**64
    return Subset.HELDOUT if is_heldout else Subset.TRAIN
