"""Rewards, the same function for every system.

`even_tokens` is that of `iteration_vs_peers.py`: cheap, and different for almost any two responses, so
that advantages are not zero. `sums` is that of `real_model.py`.
"""

import re


def even_tokens(completions, **columns):
    """Share of tokens with an even number, of texts as "3 17 5"."""
    numbers = [[int(word) for word in text.split() if word.isdigit()] for text in completions]
    return [sum(number % 2 == 0 for number in said) / max(1, len(said)) for said in numbers]


def sums(completions, answer, **columns):
    """1 if the number with which a response begins is the right one, else 0."""
    found = [re.match(r" *(\d+)", text) for text in completions]
    return [float(x is not None and x[1] == right) for x, right in zip(found, answer, strict=True)]
