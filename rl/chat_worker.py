"""The process that a chat template runs in: a script, started by `chat_template.py`.

A template is a program that came with the weights. It may not end, or fill the memory: this process
ends itself after so many seconds of work, and gets no more than so many bytes. It speaks pickles:
told a template, its variables and messages, it answers with the text, or with what the template
raised. Imports nothing of the project.
"""

import os
import pickle
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

MAX_CHARACTERS = 2**24  # of a text; its tokens would take a quarter of a minute


def main(seconds: float, num_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the command, which ends this process
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an import prints is no answer
    # PyTorch is missing, which is how it should be.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.utils.chat_template_utils import render_jinja_template  # before the limits

    _limit_memory(num_bytes)
    while True:
        try:
            template, variables, messages = pickle.load(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor: others may be at work
        try:
            answer = _render(render_jinja_template, template, variables, messages), ""
        except Exception as error:  # a template may raise anything
            answer = None, f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answer, answers)


def _render(
    render: Any, template: str, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> str:
    given = [{key: value for key, value in m.items() if value is not None} for m in messages]
    (text,), _ = render([given], chat_template=template, **variables)
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it makes a text of {len(text):,} characters")
    text.encode()  # raises for half of a character, which no tokenizer reads
    return text


def _limit_memory(num_bytes: int) -> None:
    """To so much more than is held now, where the system says how much that is."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        held = int(statm.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = held + num_bytes if hard == resource.RLIM_INFINITY else min(held + num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _send(answer: object, answers: BinaryIO) -> None:
    pickle.dump(answer, answers)
    answers.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
