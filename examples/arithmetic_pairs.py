"""Preference pairs of the built-in arithmetic: a right and a wrong response to each problem.

    python examples/arithmetic_pairs.py > pairs.jsonl
    python examples/arithmetic_pairs.py --split heldout --pairs 500 > heldout.jsonl

The truth is known, so it can be seen how much of it a reward model has learned, and whether a policy
that is trained by it gives right answers (docs/reward-models.md).
"""

import argparse
import json
from collections.abc import Iterator

import numpy as np

from pat_jax.rl.data.arithmetic import problems, solve, worked

FIRST_SEED = 2_000_003  # other problems than those that policies practise


def pairs(count: int, seed: int, split: str) -> Iterator[dict[str, str]]:
    """Yields rows of a data file, one for each problem. The problems of `split` "heldout" are those
    that policies are evaluated on, whatever the seed."""
    rng = np.random.default_rng((seed, 1))
    for prompt in problems(FIRST_SEED + seed, split).first(count):
        right = worked(prompt.text)
        yield {"prompt": prompt.text, "chosen": right, "rejected": wrong(prompt.text, rng)}


def wrong(text: str, rng: np.random.Generator) -> str:
    """Returns a response with a wrong answer to the problem `text`."""
    while True:
        mistake = (guess, slip, other_operand, left_out)[rng.integers(4)]
        response = mistake(text, rng)
        if response[-1] != solve(text):
            return response


def guess(text: str, rng: np.random.Generator) -> str:
    """An answer without steps."""
    del text
    return f"#{rng.integers(10)}"


def slip(text: str, rng: np.random.Generator) -> str:
    """One step has another result, with which the next steps go on."""
    steps = worked(text).split(";")
    at, result = int(rng.integers(len(steps))), int(rng.integers(10))
    steps[at] = f"{steps[at][:-1]}{result}"
    later = text[2 + 3 * (at + 1) : -1]
    rest = [worked(f"a{result}{later}=")] if at < len(steps) - 1 else []
    return ";".join([*steps[: at + 1], *rest])


def other_operand(text: str, rng: np.random.Generator) -> str:
    """One term is read with another operand."""
    at = _term(text, rng)
    return worked(f"{text[: at + 2]}{rng.integers(2, 5)}{text[at + 3 :]}")


def left_out(text: str, rng: np.random.Generator) -> str:
    """One term is missing."""
    at = _term(text, rng)
    return worked(text[:at] + text[at + 3 :])


def _term(text: str, rng: np.random.Generator) -> int:
    """Returns where a term of three characters begins, which is any but the first."""
    return 2 + 3 * int(rng.integers((len(text) - 3) // 3))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=16000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    args = parser.parse_args()
    for row in pairs(args.pairs, args.seed, args.split):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
