"""The options that determine the buckets of an engine, without its other options."""

from typing import NamedTuple


class BucketLimits(NamedTuple):
    min_rows: int
    min_length: int
    max_length: int
