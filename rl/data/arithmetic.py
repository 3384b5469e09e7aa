"""The built-in task: sums worked step by step, whose lengths have a heavy tail.

    prompt    a3b+8c*5d+9=               from left to right, every value modulo 10
    response  b3+8=1;c1*5=5;d5+9=4;#4    letter, value so far, operand copied, new value; answer

A term costs 3 tokens of prompt and 7 of response, so the response's length follows the number of
terms, which `TermCounts` draws from a power law. The reward is exact (`rewards.exact`), and a
transformer of less than a million parameters learns the steps in some hundred supervised steps.
Demonstrations are of mixed quality, as supervised data is (`DemonstrationMix`): a policy that
imitates them answers about half of the problems, and reinforcement has the rest to gain.

Knows characters, digits and random draws. Does not know models or training.
"""

from dataclasses import dataclass

import numpy as np

from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.data.epochs import Cursor
from pat_jax.rl.data.subset import Subset, subset_of
from pat_jax.rl.text.char_tokenizer import CharTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = CharTokenizer("0123456789" + LETTERS + "+*=;#")

HELDOUT_SHARE = 1 / 8
HELDOUT_FIRST_ID = 1 << 30  # held-out ids start here, training ids at 0
_MULTIPLY_SHARE = 1 / 3
# Operands 2 … 4: a 0 or 1 would make steps without arithmetic, and each one more is twenty more
# facts for the policy to learn by heart, which is what the warm start's time goes into.
_OPERANDS = (2, 5)
_PROMPT_TOKENS_PER_TERM = 3


@dataclass(frozen=True)
class TermCounts:
    """Number of terms n with P(n ≥ k) ∝ k^-tail on minimum … maximum, the mass beyond cut off.

    The default has median 4 and 99th percentile 16: full responses of 24 and 108 tokens, 129 at
    most. A smaller `tail` is heavier.
    """

    minimum: int = 3
    maximum: int = 19
    tail: float = 2.2

    def __post_init__(self):
        if not 2 <= self.minimum <= self.maximum <= len(LETTERS) or self.tail <= 0:
            raise ValueError(
                f"{self}: expected 2 <= minimum <= maximum <= {len(LETTERS)} and a positive tail"
            )

    @property
    def max_prompt_length(self) -> int:
        return _PROMPT_TOKENS_PER_TERM * self.maximum

    def draw(self, rng: np.random.Generator) -> int:
        beyond = ((self.maximum + 1) / self.minimum) ** -self.tail
        survival = 1 - rng.random() * (1 - beyond)
        return min(int(self.minimum * survival ** (-1 / self.tail)), self.maximum)


@dataclass(frozen=True)
class DemonstrationMix:
    """How sloppy the demonstrations are; what is left of the shares is worked without a mistake."""

    guess_share: float = 0.5
    """Demonstrations that guess a random digit at once, without any working."""
    slip_share: float = 0.0
    """Demonstrations that make slips and carry on with the wrong value."""
    slip_rate: float = 0.3
    """Chance, in a demonstration with slips, that a step's value is a random digit."""


@dataclass(frozen=True)
class _Step:
    """`operand` is applied to the value so far, the remainder modulo 10 is the new value."""

    letter: str
    sign: str
    operand: int

    def apply(self, value: int) -> int:
        return (value + self.operand if self.sign == "+" else value * self.operand) % 10

    def write(self, before: int, after: int) -> str:
        return f"{self.letter}{before}{self.sign}{self.operand}={after};"


class ArithmeticProblems:
    """An endless sequence of problems: each is a function of the seed, the split and its index.

    Held-out problems do not depend on the seed, so that runs compare. The two splits share no
    problem: which one a problem is in follows from its text (`subset_of`), and draws that fall into
    the other are drawn again. A short problem may come back under another index and id.
    """

    def __init__(self, seed: int, split: Subset, term_counts: TermCounts):
        self.split = split
        self.term_counts = term_counts
        self._entropy = (1,) if split is Subset.HELDOUT else (0, seed)
        self._first_id = HELDOUT_FIRST_ID if split is Subset.HELDOUT else 0

    def __getitem__(self, index: int) -> Prompt:
        if index < 0:  # an endless sequence has no end to count from
            raise IndexError(f"index {index}: expected 0 or more")
        rng = np.random.default_rng((*self._entropy, index))
        text = _draw_text(self.term_counts, rng)
        while subset_of(text, HELDOUT_SHARE) is not self.split:
            text = _draw_text(self.term_counts, rng)
        return Prompt(
            id=self._first_id + index,
            tokens=tuple(TOKENIZER.encode_prompt(text)),
            text=text,
            columns={"answer": solve(text)},
        )

    num_different = None  # they have no end
    checksum = 0  # nothing can change them

    def draw(self, at: Cursor, size: int) -> tuple[list[Prompt], Cursor]:
        """As `Problems.draw`, all in one epoch."""
        stop = at.offset + size
        return [self[index] for index in range(at.offset, stop)], Cursor(0, stop)

    def after(self, batches: int, size: int) -> Cursor:
        return Cursor(0, batches * size)

    def batch(self, step: int, size: int) -> list[Prompt]:
        """The prompts of iteration `step`, as `draw`, where all before it have drawn `size`."""
        return self.draw(self.after(step, size), size)[0]

    def epochs(self, at: Cursor) -> None:
        """None: they have no end."""

    def first(self, count: int) -> list[Prompt]:
        """The first `count` prompts, the same in every run for the held-out split."""
        return self.batch(0, count)


def problems(
    seed: int, split: Subset | str, *, term_counts: TermCounts | None = None
) -> ArithmeticProblems:
    return ArithmeticProblems(seed, Subset(split), term_counts or TermCounts())


def solve(text: str) -> str:
    """The answer to the prompt `text`, one digit."""
    value, steps = _parse(text)
    for step in steps:
        value = step.apply(value)
    return str(value)


def demonstration(
    prompt: Prompt, rng: np.random.Generator, mix: DemonstrationMix | None = None
) -> tuple[int, ...]:
    """A completion to imitate, end of sequence included: careful, guessed, or with slips."""
    mix = mix or DemonstrationMix()
    value, steps = _parse(prompt.text)
    style = rng.random()
    if style < mix.guess_share:
        working, answer = "", int(rng.integers(10))
    elif style < mix.guess_share + mix.slip_share:
        working, answer = _work(value, steps, slips=_Slips(rng, mix.slip_rate))
    else:
        working, answer = _work(value, steps)
    return (*TOKENIZER.encode(f"{working}#{answer}"), TOKENIZER.eos_ids[0])


@dataclass(frozen=True)
class _Slips:
    rng: np.random.Generator
    rate: float

    def perturb(self, value: int) -> int:
        return int(self.rng.integers(10)) if self.rng.random() < self.rate else value


def _work(value: int, steps: list[_Step], slips: _Slips | None = None) -> tuple[str, int]:
    """The written steps from `value` on, and the value they end at."""
    written = []
    for step in steps:
        after = step.apply(value)
        if slips is not None:
            after = slips.perturb(after)
        written.append(step.write(value, after))
        value = after
    return "".join(written), value


def _draw_text(term_counts: TermCounts, rng: np.random.Generator) -> str:
    num_terms = term_counts.draw(rng)
    signs = np.where(rng.random(num_terms - 1) < _MULTIPLY_SHARE, "*", "+")
    operands = rng.integers(*_OPERANDS, size=num_terms - 1)
    terms = zip(LETTERS[1:num_terms], signs, operands, strict=True)
    first = f"{LETTERS[0]}{rng.integers(10)}"
    return first + "".join(f"{letter}{sign}{operand}" for letter, sign, operand in terms) + "="


def _parse(text: str) -> tuple[int, list[_Step]]:
    """The first term's value, and the steps of the other terms."""
    terms = text[2:-1]
    width = _PROMPT_TOKENS_PER_TERM
    chunks = [terms[start : start + width] for start in range(0, len(terms), width)]
    return int(text[1]), [_Step(letter, sign, int(digit)) for letter, sign, digit in chunks]
