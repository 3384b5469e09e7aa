"""The process that runs what came with the weights: a script, started by `text_worker.py`.

A chat template is a program, and a tokenizer nearly one. It may not end, fill the memory or end the
process: this one ends itself after so many seconds of work, and gets no more than so many bytes. It
is asked in pickles, and answers each in a line of JSON: a text or null, what was raised, and the
seconds that it took. Imports nothing of the project.
"""

import json
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_CHARACTERS = 2**24  # of a text; its tokens would take a quarter of a minute
MAX_GROWTH = 64  # tokens that a character may become: one has four bytes at most


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the command, which ends this process
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an import prints is not an answer
    # PyTorch is missing, which is how it should be.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # Threads, of which each takes memory that none of them uses.
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", MALLOC_ARENA_MAX="2")
    from transformers import AutoTokenizer  # before the limits
    from transformers.utils.chat_template_utils import render_jinja_template

    ways = {
        "render": lambda *told: _render(render_jinja_template, *told),
        "load": lambda *told: _load(AutoTokenizer, *told),
    }
    while True:
        try:
            kind, (seconds, num_bytes), *told = pickle.load(requests)
        except EOFError:
            return
        _limit_memory(num_bytes)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor: others may be at work
        begun = time.process_time()
        try:
            answer = ways[kind](*told), ""
        # A template may raise anything, and what Rust raises when it panics is not an Exception.
        except BaseException as error:
            answer = None, f"{type(error).__name__}: {error}"[:10_000]
        signal.setitimer(signal.ITIMER_PROF, 0)
        line = json.dumps([*answer, time.process_time() - begun])
        answers.write(line.encode() + b"\n")
        answers.flush()


def _render(
    render: Any, template: str, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> str:
    given = [{key: value for key, value in m.items() if value is not None} for m in messages]
    (text,), _ = render([given], chat_template=template, **variables)
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it makes a text of {len(text):,} characters")
    text.encode()  # raises for half of a character, which no tokenizer reads
    return text


def _load(auto_tokenizer: Any, directory: str, texts: Sequence[str]) -> str:
    """Reads a tokenizer, and has it read texts and write them again."""
    tokenizer = auto_tokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
    tokenizer.get_vocab()
    for text in texts:
        tokens = tokenizer.encode(text)
        if len(tokens) > MAX_GROWTH * (len(text) + 1):
            raise ValueError(
                f"it makes {len(tokens):,} tokens of a text of {len(text):,} characters"
            )
        tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return ""


def _limit_memory(num_bytes: int) -> None:
    """To so much more than is held now, where the system says how much that is."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        held = int(statm.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = held + num_bytes if hard == resource.RLIM_INFINITY else min(held + num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    main()
