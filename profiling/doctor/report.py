"""The result of an examination: a sentence for each part, and a verdict with what to do.

Knows neither devices nor programs.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError, in_one_line, printable
from pat_jax.common.files import replace_text

LONGEST = 400  # characters of what a driver or a compiler says


@dataclass(frozen=True)
class Finding:
    """What was found about one part of a machine, such as its links or its kernels."""

    sentence: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""  # what is wrong, in a few words; empty if nothing is


@dataclass(frozen=True)
class Examined:
    """The result for one part of a machine: whether it is well, a sentence, and numbers."""

    name: str
    is_well: bool
    sentence: str
    seconds: float
    figures: Mapping[str, Any]

    def __str__(self) -> str:
        mark = "ok  " if self.is_well else "FAIL"
        return f"{mark}  {self.name:<10} {self.sentence} ({self.seconds:.1f} s)"


@dataclass(frozen=True, repr=False)
class Report:
    """The result of an examination; `print` shows a line for each check, and the verdict.

    Attributes:
      ok: whether all is well.
      verdict: one sentence, with what to do if not all is well.
    """

    ok: bool
    verdict: str
    checks: Sequence[Examined]

    def __repr__(self) -> str:
        return "\n".join([*(_line(str(check)) for check in self.checks), self.verdict])


@dataclass
class Examination:
    """Examines the parts of a machine one after the other, also after a part that fails.

    Attributes:
      command: the command line.
      tell: called with each line as soon as it is known.
      hung: called with the report if a part takes too long: inside a driver it cannot be stopped.
      out: the file of the report, or None for no file.
      step_seconds: the most seconds that one part may take.
    """

    command: str
    tell: Callable[[str], None]
    hung: Callable[[Report], None]
    out: Path | None = None
    step_seconds: float = 300.0
    parts: list[Examined] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)  # what to do, for each part that fails

    def look(self, name: str, examine: Callable[[], Finding], todo: str) -> None:
        """Examines one part and prints its line. `todo` is what to do if it fails, as text after
        "To do:". Raises a UserError of the first part only: an option is wrong."""
        start = time.perf_counter()
        guard = threading.Timer(self.step_seconds, self._give_up, (name, todo))
        guard.daemon = True
        guard.start()
        try:
            found = examine()
        except UserError as error:
            if not self.parts:
                raise  # the options are wrong
            found = Finding(str(error), trouble=str(error))
        except Exception as error:  # a compiler, a driver or a network raises what it likes
            text = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
            found = Finding(text, trouble=text)
        finally:
            guard.cancel()
        seconds = time.perf_counter() - start
        if self.parts and self.parts[-1].name == name:  # it has been given up
            self.parts.pop()
            late = f"{found.sentence.rstrip('.')}; it took more than {self.step_seconds:g} s"
            found = Finding(late, found.figures, trouble=late)
        self._add(Examined(name, not found.trouble, found.sentence, seconds, found.figures), todo)

    def _add(self, part: Examined, todo: str) -> None:
        self.parts.append(part)
        if not part.is_well:
            self.todo.append(todo)
        self.tell(_line(str(part)))

    @property
    def is_well(self) -> bool:
        return bool(self.parts) and all(part.is_well for part in self.parts)

    def verdict(self, well: str) -> str:
        """Returns one sentence: `well` if nothing is wrong, else every trouble and what to do."""
        wrong = [part for part in self.parts if not part.is_well]
        if not wrong:
            return f"verdict: {well}"
        troubles = "; ".join(f"{part.name}: {part.sentence.rstrip('.')}" for part in wrong)
        return f"verdict: not well: {troubles}. To do: {'; '.join(dict.fromkeys(self.todo))}."

    def finish(self, well: str) -> Report:
        """Prints the verdict and writes the report."""
        verdict = _line(self.verdict(well))
        self.tell(verdict)
        if self.out is not None:
            content = {
                "command": self.command,
                "is_well": self.is_well,
                "verdict": verdict,
                "seconds": round(sum(part.seconds for part in self.parts), 3),
                "parts": [asdict(part) for part in self.parts],
            }
            replace_text(self.out, json.dumps(content, indent=1))
        return Report(self.is_well, verdict, tuple(self.parts))

    def _give_up(self, name: str, todo: str) -> None:
        seconds = self.step_seconds
        self._add(Examined(name, False, "has not come to an end", seconds, {}), todo)
        self.hung(self.finish(""))


def _line(text: str) -> str:
    return printable(in_one_line(text))
