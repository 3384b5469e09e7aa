"""Chats to text, by a checkpoint's chat template, in a process that can be lost.

Knows the process and its limits. Does not know tokens.
"""

import contextlib
import pickle
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS, NUM_BYTES = 10.0, 2**30  # of one text; a usual one takes a thousandth of either

# Arguments of a rendering that are not the template's.
_OURS = ("messages", "add_generation_prompt", "continue_final_message", "chat_template")
_WORKER = Path(__file__).with_name("chat_worker.py")


class ChatTemplateError(ValueError):
    """One sentence about what the template did with some messages."""


class ChatTemplate:
    """A template; serves one thread at a time.

    Args:
      constants: of the checkpoint, such as its special tokens.
    """

    def __init__(
        self,
        template: str,
        constants: Mapping[str, Any],
        *,
        seconds: float = SECONDS,
        num_bytes: int = NUM_BYTES,
    ):
        self._template, self._constants = template, dict(constants)
        self._limits = seconds, num_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def check_variables(self, names: Iterable[str]) -> None:
        """Raises ChatTemplateError for a name that the template never says."""
        for name in names:
            if name in _OURS or not re.search(rf"\b{re.escape(name)}\b", self._template):
                raise ChatTemplateError(
                    f"the chat template has no variable {name!r} to set: expected "
                    "chat_template_kwargs that it knows; correct the name or leave it out."
                )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        is_closed: bool = False,
    ) -> str:
        """What the policy reads: a last message of the assistant is continued, after any other
        one the assistant's is begun. Or, closed, what was said, and no more.

        Raises:
          ChatTemplateError: the template refuses the messages, fails, or takes too long.
        """
        process = self._running()
        given = [dict(message) for message in messages]
        is_begun = not is_closed and given[-1]["role"] == "assistant"
        how = {
            "add_generation_prompt": not is_closed and not is_begun,
            "continue_final_message": is_begun,
        }
        told = self._template, {**self._constants, **(variables or {}), **how}, given
        try:
            text, error = _ask(process, told)
        except (EOFError, BrokenPipeError):
            raise self._died(process) from None
        if text is None:
            reason = (error.strip().splitlines() or ["no reason"])[0][:200]
            raise ChatTemplateError(
                f"the chat template fails ({reason}): expected messages that it is for; correct "
                "them, or the template."
            )
        return text

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # -P: the files beside the script are no modules.
            command = [sys.executable, "-P", str(_WORKER), *map(str, self._limits)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                start_new_session=True,  # Ctrl-C is not for it: it ends with its input
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
        return self._process

    def _died(self, process: subprocess.Popen[bytes]) -> ChatTemplateError:
        """The next text gets another process."""
        self._process = None
        self._finalizer()
        if process.returncode == -signal.SIGPROF:
            what = f"works for more than {self._limits[0]:g} s"
        else:
            what = f"ends its process with code {process.returncode}"
        return ChatTemplateError(
            f"the chat template {what}: expected a text at once; correct the template or the "
            "messages."
        )


def _ask(process: subprocess.Popen[bytes], told: object) -> tuple[str | None, str]:
    assert process.stdin and process.stdout  # they are pipes
    pickle.dump(told, process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe
        with contextlib.suppress(BrokenPipeError):  # of what was not read any more
            pipe.close()
    process.wait()
