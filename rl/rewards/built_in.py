"""The rewards that come with the trainer; `rewards.py` says what a reward is.

Knows texts, answers and how a response ended. Imports no jax.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import FinishReason
from pat_jax.rl.rewards.math_value import same_value
from pat_jax.rl.text.final_answer import final_answer, last_box

RewardFunction = Callable[..., Sequence[float]]
Column = TypeVar("Column")

_NUMBER = re.compile(
    r"(?:(?<![\w)}\]])-)?"  # a minus after an operand is a subtraction, not a sign
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:/\d+)?"
)


def exact_reward(
    prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[object]
) -> list[float]:
    """Returns 1 if the response ended and the text after its last `#` is the answer, else 0."""
    del prompts
    answers = require_column("exact", "answer", columns)
    reasons = require_column("exact", "finish_reason", columns)
    return [
        float(reason == FinishReason.STOP and "#" in text and text.rpartition("#")[2] == answer)
        for text, answer, reason in zip(completions, answers, reasons, strict=True)
    ]


def math_reward(
    prompts: Sequence[str],
    completions: Sequence[str],
    is_thinking: Sequence[bool] = (),
    **columns: Sequence[object],
) -> list[float]:
    r"""Returns 1 if the response ended and its final answer has the value of `answer`, else 0.

    A final answer has one of these forms (`final_answer.py`): `\boxed{x}`, `<answer>x</answer>`,
    `#### x`, `Answer: x`, or `$x$` as the whole last line.

    Args:
      is_thinking: for each response, whether the chat template opened a thought before it; such a
        response has no answer before `</think>`. Empty if the template opened no thought.
    """
    answers = require_column("math", "answer", columns)
    reasons = require_column("math", "finish_reason", columns)
    thinking = is_thinking or [False] * len(prompts)
    rows = zip(prompts, completions, thinking, answers, reasons, strict=True)
    return [
        float(
            reason == FinishReason.STOP
            and _is_right(final_answer(text, prompt, is_thinking=thinks), answer)
        )
        for prompt, text, thinks, answer, reason in rows
    ]


def math_lenient_reward(
    prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[object]
) -> list[float]:
    r"""Returns 1 if the last `\boxed{…}` or, without one, the last number has the answer's value.

    Else it returns 0. A truncated response may get 1 by chance, from its last number.
    """
    del prompts
    answers = require_column("math_lenient", "answer", columns)
    found = [last_box(text) or _last_number(text) for text in completions]
    return [float(_is_right(one, answer)) for one, answer in zip(found, answers, strict=True)]


def no_reward(
    prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[object]
) -> list[float]:
    """Returns 0, for runs that learn from a teacher alone."""
    del prompts, columns
    return [0.0] * len(completions)


MATH: Mapping[str, RewardFunction] = {"math": math_reward, "math_lenient": math_lenient_reward}
# The built-in rewards that compare a response with its row's answer.
COMPARING: Mapping[str, RewardFunction] = {"exact": exact_reward, **MATH}
NONE = "none"
BUILT_IN: Mapping[str, RewardFunction] = {**COMPARING, NONE: no_reward}


def check_columns(specs: Sequence[str], columns: Mapping[str, object], source: str) -> None:
    """Raises UserError if the data lacks the column that a built-in reward compares with.

    Args:
      source: name of the data in the message.
    """
    for spec in specs:
        if spec in COMPARING:
            require_column(spec, "answer", columns, source)


def require_column(
    reward: str, name: str, columns: Mapping[str, Column], source: str = "the data"
) -> Column:
    if name not in columns:
        raise UserError(
            f"reward {reward!r} needs the column {name!r} ({source} has {', '.join(columns) or 'none'})"
            ": expected it in every row; add it to the data or choose another --reward."
        )
    return columns[name]


def _is_right(found: str | None, answer: object) -> bool:
    return found is not None and same_value(found, str(answer))


def _last_number(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None
