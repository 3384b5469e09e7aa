"""Reward functions of your own, written as for TRL.

    python -m pat_jax.train --model Qwen/Qwen2.5-0.5B-Instruct --data openai/gsm8k:main/train \
        --reward examples/rewards.py:right_number examples/rewards.py:follows_format \
        --reward_weights 1 0.2

A function gets the columns that it names, for all responses to one prompt, and returns a number for
each response, or None where it does not apply. It runs in a process of its own.
"""

import re
import subprocess
import sys
from collections.abc import Sequence

FORMAT = re.compile(r"\s*<think>.+?</think>\s*<answer>.+?</answer>\s*", re.DOTALL)
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def follows_format(completions: Sequence[str], **columns: Sequence[object]) -> list[float]:
    """1 for a response that thinks between tags and then answers between tags."""
    return [float(FORMAT.fullmatch(text) is not None) for text in completions]


def right_number(
    completions: Sequence[str], answer: Sequence[str], **columns: Sequence[object]
) -> list[float]:
    """1 if the last number of the response is the answer, 0.1 for any other number, else 0."""
    scores = []
    for text, right in zip(completions, answer, strict=True):
        numbers = [number.replace(",", "") for number in NUMBER.findall(text)]
        if not numbers:
            scores.append(0.0)
        else:
            scores.append(1.0 if float(numbers[-1]) == float(right.replace(",", "")) else 0.1)
    return scores


def passes_tests(
    completions: Sequence[str], ground_truth: Sequence[str | None], **columns: Sequence[object]
) -> list[float | None]:
    """1 if the response's last block of code passes the assertions of the row; None if there are
    none. This runs what the model wrote, with your rights: use a container or a server for models
    that you do not trust."""
    return [
        None if tests is None else float(_runs(text, tests))
        for text, tests in zip(completions, ground_truth, strict=True)
    ]


def _runs(text: str, tests: str) -> bool:
    blocks = CODE.findall(text)
    if not blocks:
        return False
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", f"{blocks[-1]}\n{tests}"], capture_output=True, timeout=5
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
