"""Where prompts come from: the lines of a file, or a program that gives them in their place.

Knows files and Python's values. Does not know what the fields of a line mean (`prompt_lines.py`).
"""

import codecs
import errno
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pat_jax.common.errors import UserError, shown
from pat_jax.common.given_json import json_line
from pat_jax.common.json_text import JsonError, parse_json

# A text to continue, token ids, a chat's messages, or a line of a prompts file as a dictionary.
PromptLike = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]] | Mapping[str, Any]
COPIED = ("id", "metadata")  # fields of a prompt that its results have, too


class PromptFile:
    """The lines of a prompts file."""

    def __init__(self, path: Path):
        self.name = str(path)
        self._path = path

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yields the number, from 1, and the bytes of each line that is not blank. Raises UserError
        if the file cannot be read."""
        path = self._path
        try:
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is a folder, a device or a pipe")
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise UserError(
                f"option --prompts is {self.name!r}: the file cannot be read ({error.strerror}); expected "
                "a file of JSON lines."
            ) from None

    def where(self, number: int) -> str:
        return f"{self.name}, line {number}"


class GivenPrompts:
    """Prompts that a program gives, as the lines of a file would be."""

    name = "the prompts"

    def __init__(self, prompts: Iterable[PromptLike], sampling: Mapping[str, Any] | None = None):
        """Raises UserError if one is not a prompt. Options of a prompt win over `sampling`."""
        if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
            raise UserError(f"prompts is {shown(prompts)}: expected a list of prompts.")
        texts = [prompts] if isinstance(prompts, str) else prompts
        self._lines = [{**(sampling or {}), **_line(i, x)} for i, x in enumerate(texts, start=1)]

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return enumerate(self._lines, start=1)

    def where(self, number: int) -> str:
        return f"prompt {number}"


Prompts = PromptFile | GivenPrompts


def _line(number: int, prompt: PromptLike) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        copied = {name: prompt[name] for name in COPIED if name in prompt}
        return {**prompt, **(json.loads(json_line(f"prompt {number}", copied)) if copied else {})}
    if isinstance(prompt, str):
        return {"prompt": prompt}
    is_array = isinstance(prompt, np.ndarray) and prompt.ndim > 0
    if isinstance(prompt, bytes) or not (is_array or isinstance(prompt, Sequence)):
        raise UserError(
            f"prompt {number}: it is {shown(prompt)}: expected text, token ids, messages or a "
            "dictionary."
        )
    is_chat = any(isinstance(each, Mapping) for each in prompt)
    plain = [each.item() if isinstance(each, np.generic) else each for each in prompt]
    return {"messages" if is_chat else "token_ids": plain}


def parse_object(line: bytes | dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON object in a line, or what a program gives as one. Raises ValueError with one
    sentence if the line is not one object in UTF-8."""
    if isinstance(line, dict):
        return line
    try:
        value = parse_json(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 text at byte {error.start + 1} ({error.reason}): expected JSON in UTF-8."
        ) from None
    except JsonError as error:
        at = f" at column {error.column}" if error.column else ""
        raise ValueError(f"{error}{at}: expected one object a line.") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}: expected one object a line.")
    return value
