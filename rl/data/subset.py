"""Decides which problems are held out, by the problem's text and nothing else.

Seed, file order and run do not matter, so no run evaluates on problems that another one trained on
(a run that never evaluates holds nothing out).
"""

import hashlib
from enum import StrEnum


class Subset(StrEnum):
    TRAIN = "train"
    HELDOUT = "heldout"


def subset_of(text: str, heldout_share: float) -> Subset:
    """Returns HELDOUT if the text's 64-bit hash is in the lowest `heldout_share` of all hashes."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    is_heldout = int.from_bytes(digest, "big") < heldout_share * 2**64
    return Subset.HELDOUT if is_heldout else Subset.TRAIN
