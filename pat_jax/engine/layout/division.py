"""How axes of given sizes divide a model, and in which order they give it the most layouts.

Knows numbers alone: sizes of axes, innermost first, and a model's. Knows no mesh and no device.
"""

import math
from collections.abc import Iterator, Sequence

from pat_jax.models.config import ModelConfig

Sizes = Sequence[int]


def prime_factors(n: int) -> list[int]:
    factors, divisor = [], 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors


def dividing_run(sizes: Sizes, number: int) -> int:
    """How many of the leading axes divide a number together."""
    ways = 1
    for i, size in enumerate(sizes):
        ways *= size
        if number % ways:
            return i
    return len(sizes)


def undivided(model: ModelConfig, tp: Sizes) -> str | None:
    """What of a model tensor parallelism over such axes does not divide; None: it divides it.

    KV heads are divided by the axes of their `dividing_run` and copied over the others, which divide
    the queries of each.
    """
    queries = math.prod(tp[dividing_run(tp, model.num_kv_heads) :])
    ways = math.prod(tp)
    for what, size, parts in (
        ("num_heads / num_kv_heads", model.queries_per_kv, queries),
        ("mlp_dim", model.mlp_dim, ways),
        ("padded vocab_size", model.padded_vocab_size, ways),
    ):
        if size % parts:
            return f"{what} = {size} divisible by {parts}"
    return None


def num_layouts(model: ModelConfig, sizes: Sizes) -> int:
    """How many of the layouts that these axes give divide the model."""
    # TP 0 axes always does, and what divides by more axes divides by fewer.
    return sum(undivided(model, sizes[:taken]) is None for taken in range(len(sizes) + 1))


def best_order(model: ModelConfig, across: Sizes, inside: Sizes) -> tuple[list[int], list[int]]:
    """The axes in the order with the most layouts; of several that are as good the first, which is the
    ascending one if it is among them.

    Args:
      across: prime factors of the number of hosts.
      inside: those of the devices of a host, whose axes tensor parallelism takes first.

    Returns:
      Both, outermost first.
    """
    orders = ((outer, inner) for outer in _orders(across) for inner in _orders(inside))
    return max(orders, key=lambda order: num_layouts(model, [*order[0], *order[1]][::-1]))


def _orders(factors: Sizes) -> Iterator[list[int]]:
    """Each order once, ascending ones first."""
    if not factors:
        yield []
    for first in sorted(set(factors)):
        rest = list(factors)
        rest.remove(first)
        yield from ([first, *others] for others in _orders(rest))
