"""Reads the fields of a JSON object: an error names the file, the field and the mistake.

Knows no field of any format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError, shown

MOST = 2**31 - 1  # largest integer that a field may have
LARGEST_NUMBER = 1e30
CHECK = "check the checkpoint's config.json"


@dataclass(frozen=True)
class Fields:
    """A JSON object whose fields are read with their type checked. JSON null counts as absent."""

    values: Mapping[str, Any]
    path: Path
    prefix: str = ""

    def error(self, name: str, expected: str, advice: str) -> UserError:
        got = f"is {shown(self.values[name])}" if name in self.values else "is missing"
        return UserError(
            f"{self.path}: field '{self.prefix}{name}' {got}, expected {expected}; {advice}."
        )

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, most: int = MOST) -> int:
        value = self.values[name] if self.has(name) else default
        if type(value) is not int or not 1 <= value <= most:
            expected = f"a positive integer up to {most:,}"
            raise self.error(name, expected, CHECK)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number", CHECK)
        if not 0 < value <= LARGEST_NUMBER:
            expected = f"a positive number up to {LARGEST_NUMBER:g}"
            raise self.error(name, expected, CHECK)
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values[name] if self.has(name) else default
        if type(value) is not bool:
            raise self.error(name, "true or false", CHECK)
        return value

    def section(self, name: str) -> "Fields":
        value = self.values[name]
        if not isinstance(value, dict):
            raise self.error(name, "an object", CHECK)
        return Fields(value, self.path, f"{self.prefix}{name}.")
