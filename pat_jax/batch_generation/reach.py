"""What a short file of prompts asks for at most, so that an engine is built no larger than that."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pat_jax.batch_generation.config import Reach
from pat_jax.batch_generation.prompt_lines import LineRequest, parse_object, read_lines


def reach(path: Path, parse: Callable[[Mapping[str, Any]], LineRequest], most: Reach) -> Reach:
    """
    Args:
      parse: what a line asks for; raises ValueError where that cannot be.
      most: of the engine that the options describe.

    Returns:
      `most` where the file fills it, or has a line that is wrong: its sentence names the limits of the options.
    """
    rows = length = 0
    for _, line in read_lines(path):
        try:
            ask = parse(parse_object(line))
        except ValueError:
            return most
        rows += ask.num_samples
        length = max(length, len(ask.tokens) + ask.max_tokens)
        if rows >= most.rows:
            return most
    return Reach(max(rows, 1), min(max(length, 1), most.length))
