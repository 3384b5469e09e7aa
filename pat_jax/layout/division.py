"""How axes of given sizes divide a model, and in which order they give it the most layouts.

Knows numbers alone: sizes of axes, innermost first, and a model's. Knows no mesh and no device.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from pat_jax.models.config import ModelConfig

Sizes = Sequence[int]
# The most heads that are added, as a share of the query heads of a KV head. Every layout pays for them:
# a third (3 heads become 4) is 5 % of the weights of SmolLM2-135M; 7 that become 8 are 1.3 % of those
# of Qwen2.5-7B.
MOST_PADDING = Fraction(1, 3)


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

    KV heads are divided by the axes of their `dividing_run` and copied over the others, which
    divide the queries of each.
    """
    queries = math.prod(tp[dividing_run(tp, model.num_kv_heads) :])
    ways, heads = math.prod(tp), model.padded_queries_per_kv
    padded = "padded " if heads > model.queries_per_kv else ""
    for what, size, parts in (
        (f"{padded}num_heads / num_kv_heads", heads, queries),
        ("mlp_dim", model.mlp_dim if model.has_mlp else 0, ways),
        ("padded vocab_size", model.padded_vocab_size, ways),
    ):
        if size % parts:
            return f"{what} = {size} divisible by {parts}"
    return None


def degrees_of(model: ModelConfig, sizes: Sizes) -> set[int]:
    """The TP degrees of the layouts that these axes give and that divide the model."""
    parts = (sizes[:taken] for taken in range(len(sizes) + 1))
    return {math.prod(tp) for tp in parts if undivided(model, tp) is None}


def best_order(model: ModelConfig, across: Sizes, inside: Sizes) -> tuple[list[int], list[int]]:
    """The axes in the order with the most layouts, the most of them without padded heads; of
    several that are as good the first, which is the ascending one if it is among them.

    Args:
      across: prime factors of the number of hosts.
      inside: those of the devices of a host, whose axes tensor parallelism takes first.

    Returns:
      Both, outermost first.
    """
    unpadded = replace(model, query_multiple=1)

    def worth(order: tuple[list[int], list[int]]) -> tuple[int, int]:
        sizes = _innermost_first(order)
        return len(degrees_of(model, sizes)), len(degrees_of(unpadded, sizes))

    orders = ((outer, inner) for outer in _orders(across) for inner in _orders(inside))
    return max(orders, key=worth)


def with_padding(
    model: ModelConfig, across: Sizes, inside: Sizes, degrees: Collection[int] = ()
) -> ModelConfig:
    """The same model, padded so that these axes divide it in the most layouts, alike in all of
    them.

    Its vocabulary always; the query heads of each KV head by as few as open the most layouts, and
    by no more than MOST_PADDING of them.

    Args:
      across, inside: as of `best_order`.
      degrees: of TP, that alone are asked for; none: all.
    """
    vocab_multiple = math.lcm(model.vocab_multiple, math.prod([*across, *inside]))
    unpadded = replace(model, vocab_multiple=vocab_multiple, query_multiple=1)

    def worth(padded: ModelConfig) -> tuple[int, int, int]:
        sizes = _innermost_first(best_order(padded, across, inside))
        opened, without = degrees_of(padded, sizes), degrees_of(unpadded, sizes)
        if degrees:
            opened, without = opened & set(degrees), without & set(degrees)
        return len(opened), len(without), -padded.padded_queries_per_kv

    multiples = sorted(_products([*across, *inside]))
    candidates = (replace(unpadded, query_multiple=n) for n in multiples)
    most = model.queries_per_kv * (1 + MOST_PADDING)
    return max((x for x in candidates if x.padded_queries_per_kv <= most), key=worth)


def _innermost_first(order: tuple[Sizes, Sizes]) -> list[int]:
    return [*order[0], *order[1]][::-1]


def _products(factors: Sizes) -> set[int]:
    """Of some of the factors, or of none: 1."""
    products = {1}
    for factor in factors:
        products |= {factor * product for product in products}
    return products


def padding_of_heads(model: ModelConfig) -> str:
    """A sentence about it; nothing where there is none."""
    if model.padded_num_heads == model.num_heads:
        return ""
    return (
        f"{model.num_heads} query heads are padded to {model.padded_num_heads} with heads of zeros, in every "
        "layout, so that wider ones divide them."
    )


def _orders(factors: Sizes) -> Iterator[list[int]]:
    """Each order once, ascending ones first."""
    if not factors:
        yield []
    for first in sorted(set(factors)):
        rest = list(factors)
        rest.remove(first)
        yield from ([first, *others] for others in _orders(rest))
