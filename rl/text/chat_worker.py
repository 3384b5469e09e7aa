"""The script of the process that runs a checkpoint's own code, started by `text_worker.py`.

A chat template is a program, and a tokenizer nearly one. Either may run for ever, fill the memory
or end its process. So this process limits its own time and memory. It reads requests as pickles,
and answers each with a line of JSON: a text or null, what was raised, and the seconds taken.
Imports nothing of the project.
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

MAX_CHARACTERS = 2**24  # most characters of a text: tokenizing them takes a quarter of a minute
MAX_GROWTH = 64  # most tokens per character; a character has at most four bytes


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the command, which ends this process
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that text printed by an import is not taken for an answer
    # Silences the warning that PyTorch is missing: it is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # No threads: each reserves memory that it does not use.
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
        signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time: others may be running
        begun = time.process_time()
        try:
            answer = ways[kind](*told), ""
        # A template may raise anything, and a panic in Rust is not an Exception.
        except BaseException as error:
            answer = None, f"{type(error).__name__}: {error}"[:10_000]
        signal.setitimer(signal.ITIMER_PROF, 0)
        # Lift the limit of memory: the answer and the next request need memory too.
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
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
    """Loads a tokenizer, and encodes and decodes the texts with it."""
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
    """Limits memory to `num_bytes` more than is used now, if the system says how much that is."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        held = int(statm.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = held + num_bytes if hard == resource.RLIM_INFINITY else min(held + num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    main()
