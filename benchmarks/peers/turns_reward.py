"""The reward of `iteration_vs_peers.py`, the same function for every system: cheap, and different for
almost any two responses, so that advantages are not zero."""


def even_tokens(completions, **columns):
    """Share of tokens with an even number, of texts as "3 17 5"."""
    numbers = [[int(word) for word in text.split() if word.isdigit()] for text in completions]
    return [sum(number % 2 == 0 for number in said) / max(1, len(said)) for said in numbers]
