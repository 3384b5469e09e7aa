"""How mesh axes of given sizes divide a model, and which order of them gives the most layouts.

Knows numbers alone: the sizes of axes, innermost first, and of a model. Knows no mesh or device.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from pat_jax.models.config import VOCAB_BLOCK, ModelConfig

Sizes = Sequence[int]
# The most padding heads, as a share of the query heads of a KV head. Every layout pays for them: a
# third (3 heads become 4) adds 5 % to the weights of SmolLM2-135M; 7 heads that become 8 add 1.3 %
# to those of Qwen2.5-7B.
MOST_PADDING = Fraction(1, 3)


def prime_factors(n: int) -> list[int]:
    factors = []
    divisor = 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors


def dividing_run(sizes: Sizes, number: int) -> int:
    """Returns how many of the leading axes have a product that divides `number`."""
    ways = 1
    for i, size in enumerate(sizes):
        ways *= size
        if number % ways:
            return i
    return len(sizes)


def undivided(model: ModelConfig, tp: Sizes) -> str | None:
    """Returns what tensor parallelism over axes of sizes `tp` cannot divide, or None if nothing.

    The axes of the `dividing_run` divide the KV heads. The other axes hold copies of the KV heads
    and divide the query heads of each.
    """
    queries = math.prod(tp[dividing_run(tp, model.num_kv_heads) :])
    ways = math.prod(tp)
    heads = model.padded_queries_per_kv
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
    """Returns the TP degrees that these axes can form and that divide the model."""
    parts = (sizes[:taken] for taken in range(len(sizes) + 1))
    return {math.prod(tp) for tp in parts if undivided(model, tp) is None}


def best_order(model: ModelConfig, across: Sizes, inside: Sizes) -> tuple[list[int], list[int]]:
    """Returns the order of the axes that gives the model the most layouts. Returns `across` and
    `inside` in that order, outermost first.

    Ties go to the order with the most layouts without padded heads, then to the ascending order.

    Args:
      across: prime factors of the number of hosts.
      inside: prime factors of a host's number of devices; TP takes these axes first.
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
    """Returns the model padded so that the axes divide it in the most layouts.

    The padding is the same in every layout. The vocabulary is always padded. If it is a multiple of
    VOCAB_BLOCK, its shards over the devices of one host are too, so that tokens are drawn on them.
    The query heads of each KV head get the fewest padding heads that allow the most layouts, at
    most MOST_PADDING.

    Args:
      across, inside: see `best_order`.
      degrees: the TP degrees to count; empty counts all.
    """
    vocab_multiple = math.lcm(model.vocab_multiple, math.prod([*across, *inside]))
    if vocab_multiple % VOCAB_BLOCK == 0:
        vocab_multiple = math.lcm(vocab_multiple, VOCAB_BLOCK * math.prod(inside))
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
    """Returns the product of each subset of the factors; the empty subset's is 1."""
    products = {1}
    for factor in factors:
        products |= {factor * product for product in products}
    return products


def padding_of_heads(model: ModelConfig) -> str:
    """Returns a sentence about the padding of query heads, empty if there is none."""
    if model.padded_num_heads == model.num_heads:
        return ""
    return (
        f"{model.num_heads} query heads are padded to {model.padded_num_heads} with heads of zeros, in every "
        "layout, so that wider ones divide them."
    )


def _orders(factors: Sizes) -> Iterator[list[int]]:
    """Yields each order of the factors once, the ascending one first."""
    if not factors:
        yield []
    for first in sorted(set(factors)):
        rest = list(factors)
        rest.remove(first)
        yield from ([first, *others] for others in _orders(rest))
