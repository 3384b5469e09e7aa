"""Tries out a tokenizer in another process before this process loads it.

A library in Rust reads `tokenizer.json`. It may panic, never return or take all memory: on the file
itself, or on texts that match the file's rules. Knows the files. Does not know how tokens are used.
"""

import signal
import string
import zlib
from collections.abc import Iterator
from pathlib import Path

from pat_jax.common.json_text import JsonError, parse_json
from pat_jax.rl.text.text_worker import Limits, WorkerDied, give_back, take

LIMITS = Limits(seconds=20.0, num_bytes=2**32)  # a vocabulary of 256,000 takes some 3 s and 1 GiB
_RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens")
_TEXTS = (
    string.printable,
    "What is 12 * 3? Let's think step by step, and answer: \\boxed{36}.\n\n",
    *(unit * 2000 for unit in ("a", "A ", "1", " ", "\n", "-", "é", "日", "👩‍🔬", "a\u0301")),
    "a" * 2000 + "!",
    "ﷺ" * 500,  # each character becomes 18
)
_MOST_OF_A_RULE = 64  # characters of a rule's text; longer texts are not tried
_passed: set[int] = set()  # checksums of tokenizers that need not be tried again


class TokenizerTrial:
    """A trial in the background, which begins when this object is created."""

    def __init__(self, directory: Path):
        self._checksum = _checksum(directory)
        self._worker = None
        if self._checksum not in _passed:
            self._worker = take()
            texts = (*_TEXTS, *_texts_of_rules(directory / "tokenizer.json"))
            self._worker.begin(LIMITS, "load", str(directory), texts)

    def problem(self) -> str:
        """Waits for the trial. Returns the tokenizer's problem as a text, or ""."""
        if self._worker is None:
            return ""
        try:
            answer = self._worker.answer()
        except WorkerDied as death:
            if death.code == -signal.SIGPROF:
                return f"it works for more than {LIMITS.seconds:g} s"
            return f"it ends its process with code {death.code}"
        if not answer.error.startswith("MemoryError"):  # after it a module may be half imported
            give_back(self._worker)
        if answer.text is None:
            lines = answer.error.strip().splitlines() or ["no reason"]
            return lines[0][:200]
        _passed.add(self._checksum)
        return ""


def _checksum(directory: Path) -> int:
    """Returns one checksum of all files that a tokenizer may be read from."""
    found = 0
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja", ".tiktoken"):
            found = zlib.crc32(path.name.encode() + path.read_bytes(), found)
    return found


def _texts_of_rules(path: Path) -> Iterator[str]:
    """Yields the texts that the file's rules look for, so that the rules are tried on them."""
    if not path.is_file():
        return
    try:
        content = parse_json(path.read_bytes())
    except JsonError:
        return  # the library says what is wrong
    rules = [content.get(name) for name in _RULES] if isinstance(content, dict) else []
    found = [text for text in _strings(rules) if 0 < len(text) <= _MOST_OF_A_RULE][:200]
    yield " ".join(found)
    yield from (text * 50 for text in found[:50])


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
