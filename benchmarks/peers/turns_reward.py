"""Rewards, the same function for every system.

`even_tokens` is that of `iteration_vs_peers.py`: cheap, and different for almost any two responses, so
that advantages are not zero. `sums` is that of `real_model.py`.
"""


def even_tokens(completions, **columns):
    """Share of tokens with an even number, of texts as "3 17 5"."""
    numbers = [[int(word) for word in text.split() if word.isdigit()] for text in completions]
    return [sum(number % 2 == 0 for number in said) / max(1, len(said)) for said in numbers]


def sums(completions, answer, **columns):
    """Half for the share of digits among a response's characters, half for how near a response that is a
    number comes to the right one. Responses are messages, as in TRL's examples."""
    texts = [messages[0]["content"].strip() for messages in completions]
    return [_score(text, int(right)) for text, right in zip(texts, answer, strict=True)]


def _score(text, right):
    digits = sum(map(str.isdigit, text)) / max(1, len(text))
    number = int(text) if text.isascii() and text.isdecimal() else 0
    return 0.5 * digits + 0.5 * max(0.0, 1 - abs(number - right) / right)
