"""The built-in task: arithmetic solved step by step, with a heavy tail of response lengths.

    prompt    a3b+8c*5d+9=               from left to right, every value modulo 10
    response  b3+8=1;c1*5=5;d5+9=4;#4    letter, value so far, operand copied, new value; answer

A term takes 3 tokens of the prompt and 7 of the response. So a response's length follows the number
of terms, which is drawn from a power law. The reward is exact (`rewards.exact`). A transformer of
less than a million parameters learns the task in some hundred supervised steps. Half of the
demonstrations guess the answer, so a policy that imitates them solves about half of the problems,
and reinforcement can gain the rest.

Knows characters, digits and random draws. Does not know models or training.
"""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.data.epochs import Cursor
from pat_jax.rl.data.splits import Subset, subset_of
from pat_jax.rl.text.chat_template import ChatTemplateError
from pat_jax.rl.text.tokenizer import NO_TEMPLATE, PromptText, flatten_messages


class CharTokenizer:
    """Each character of an alphabet is a token; 0 is padding and 1 is the end of sequence."""

    eos_ids = (1,)
    _NUM_SPECIAL = 2

    def __init__(self, alphabet: str):
        self.alphabet = alphabet
        self._ids = {char: index + self._NUM_SPECIAL for index, char in enumerate(alphabet)}

    @property
    def vocab_size(self) -> int:
        return len(self.alphabet) + self._NUM_SPECIAL

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.alphabet.encode())

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise UserError(
                f"text {text[:40]!r} has the character {unknown[0]!r}: this tokenizer knows only "
                f"{self.alphabet!r}; use a model directory with its own tokenizer."
            )
        return [self._ids[char] for char in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(
            self.alphabet[token - self._NUM_SPECIAL]
            for token in tokens
            if token >= self._NUM_SPECIAL
        )

    def encode_prompt(
        self, prompt: PromptText, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        if variables:
            raise ChatTemplateError(f"there is no chat template {NO_TEMPLATE}")
        return self.encode(flatten_messages(prompt))


LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = CharTokenizer("0123456789" + LETTERS + "+*=;#")
# The same token ids as Hugging Face files, for exports. Other characters are the padding token.
TOKENIZER_DIR = Path(__file__).parent / "arithmetic_tokenizer"

HELDOUT_SHARE = 1 / 8
HELDOUT_FIRST_ID = 1 << 30  # held-out ids start here, training ids at 0
_MULTIPLY_SHARE = 1 / 3
# Operands 2 … 4: 0 and 1 would make steps without arithmetic. For each further operand the policy
# would have to memorize twenty more facts, which takes most of the warm start's time.
_OPERANDS = (2, 5)
# P(n ≥ k terms) ∝ k^-_TAIL, cut off at _MOST_TERMS: the median is 4 and the 99th percentile 16
# terms, which are full responses of 24 and 108 tokens.
_FEWEST_TERMS = 3
_MOST_TERMS = 19
_TAIL = 2.2
_PROMPT_TOKENS_PER_TERM = 3
MAX_PROMPT_LENGTH = _PROMPT_TOKENS_PER_TERM * _MOST_TERMS  # such a prompt's response: 129 tokens
_GUESS_SHARE = 0.5  # share of the demonstrations that guess the answer


class ArithmeticProblems:
    """An endless sequence of problems. Each is a function of seed, split and index.

    Held-out problems do not depend on the seed, so that runs are comparable. The two splits share
    no problem: a problem's text determines its split (`subset_of`), and draws of the other split
    are repeated. A short problem may occur again under another index and id.
    """

    def __init__(self, seed: int, split: Subset):
        self.split = split
        self._entropy = (1,) if split is Subset.HELDOUT else (0, seed)
        self._first_id = HELDOUT_FIRST_ID if split is Subset.HELDOUT else 0

    def __getitem__(self, index: int) -> Prompt:
        if index < 0:  # an endless sequence has no end from which to count
            raise IndexError(f"index {index}: expected 0 or more")
        rng = np.random.default_rng((*self._entropy, index))
        text = _draw_text(rng)
        while subset_of(text, HELDOUT_SHARE) is not self.split:
            text = _draw_text(rng)
        return Prompt(
            id=self._first_id + index,
            tokens=tuple(TOKENIZER.encode_prompt(text)),
            text=text,
            columns={"answer": solve(text)},
        )

    num_different = None  # they have no end
    checksum = 0  # nothing can change them

    def draw(self, at: Cursor, size: int) -> tuple[list[Prompt], Cursor]:
        """Returns the `size` prompts from position `at` on, and the position of the next batch. All
        problems are in one endless epoch."""
        stop = at.offset + size
        return [self[index] for index in range(at.offset, stop)], Cursor(0, stop)

    def batch(self, step: int, size: int) -> list[Prompt]:
        """Returns the prompts of iteration `step` if every iteration draws `size` prompts."""
        return self.draw(Cursor(0, step * size), size)[0]

    def epochs(self, at: Cursor) -> None:
        """Returns None: the problems have no end, and so no epochs."""

    def first(self, count: int) -> list[Prompt]:
        """Returns the first `count` prompts; for the held-out split, the same in every run."""
        return self.draw(Cursor(), count)[0]


def problems(seed: int, split: Subset | str) -> ArithmeticProblems:
    return ArithmeticProblems(seed, Subset(split))


def solve(text: str) -> str:
    """Returns the answer to the prompt `text`, one digit."""
    return worked(text)[-1]


def worked(text: str) -> str:
    """Returns the correct response to the prompt `text`: every step, and the answer."""
    value = int(text[1])
    written = []
    for start in range(2, len(text) - 1, _PROMPT_TOKENS_PER_TERM):  # all terms but the first
        letter, sign, digit = text[start : start + _PROMPT_TOKENS_PER_TERM]
        operand = int(digit)
        after = (value + operand if sign == "+" else value * operand) % 10
        written.append(f"{letter}{value}{sign}{operand}={after};")
        value = after
    return f"{''.join(written)}#{value}"


def demonstration(prompt: Prompt, rng: np.random.Generator) -> tuple[int, ...]:
    """Returns the tokens of a response to imitate, worked or a guess, with the end of sequence."""
    is_guess = rng.random() < _GUESS_SHARE
    text = f"#{rng.integers(10)}" if is_guess else worked(prompt.text)
    return (*TOKENIZER.encode(text), TOKENIZER.eos_ids[0])


def _draw_text(rng: np.random.Generator) -> str:
    num_terms = _draw_num_terms(rng)
    signs = np.where(rng.random(num_terms - 1) < _MULTIPLY_SHARE, "*", "+")
    operands = rng.integers(*_OPERANDS, size=num_terms - 1)
    terms = zip(LETTERS[1:num_terms], signs, operands, strict=True)
    first = f"{LETTERS[0]}{rng.integers(10)}"
    return first + "".join(f"{letter}{sign}{operand}" for letter, sign, operand in terms) + "="


def _draw_num_terms(rng: np.random.Generator) -> int:
    beyond = ((_MOST_TERMS + 1) / _FEWEST_TERMS) ** -_TAIL
    survival = 1 - rng.random() * (1 - beyond)
    return min(int(_FEWEST_TERMS * survival ** (-1 / _TAIL)), _MOST_TERMS)
