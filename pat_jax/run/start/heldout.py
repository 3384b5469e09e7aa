"""The sets of held-out problems that a run evaluates on, and their names.

Knows prompts and names of files. Does not know how files are read (`rl/data/problems.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.data.problems import Problems
from pat_jax.rl.rewards.rewards import metric_name, numbered

HELDOUT = "heldout"  # the set held out of the training data, or of the built-in task
# Generic names of files and folders, as in gsm8k/main/test-00000-of-00001.parquet.
_NAMELESS = re.compile(
    r"(test|train|validation|valid|val|dev|eval|data|main|default|part|of|\d|[^\w\s])+"
)


@dataclass(frozen=True)
class HeldoutSet:
    name: str  # in metrics and tables
    prompts: Sequence[Prompt]

    @classmethod
    def of(cls, name: str, problems: Problems, most: int) -> "HeldoutSet":
        """Returns a set of up to `most` problems: always the same, in the order of their files."""
        return cls(name, sorted(problems.first(most), key=lambda prompt: prompt.id))


def set_names(words: Sequence[str]) -> list[str]:
    """Returns a name for each file or pattern: the file's own name, or that of the nearest folder
    if the file's is generic (such as `test`). Equal names get a number.

    >>> set_names(["gsm8k/main/test-*.parquet", "MATH-500/test.jsonl", "aime.jsonl", "old/aime.json"])
    ['gsm8k', 'MATH-500', 'aime', 'aime_2']
    >>> set_names(["openai/gsm8k:main/test", "HuggingFaceH4/MATH-500"])
    ['gsm8k', 'MATH-500']
    """
    return numbered([metric_name(_telling(word)) for word in words])


def _telling(word: str) -> str:
    path = PurePath(word.replace(":", "/"))  # a dataset's split follows the colon
    parts = [path.stem, *reversed(path.parts[:-1])]
    telling = (part for part in parts if not _NAMELESS.fullmatch(part.lower().replace("_", "-")))
    return next(telling, path.stem)
