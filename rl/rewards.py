"""Rewards: `fn(prompts, completions, **columns) -> list[float]`, built in or the user's.

`prompts` and `completions` are texts, one of each a response; `columns` are the other columns of
the data as lists of the same length, and `finish`, the `FinishReason` of each response.

Knows texts and answers. Does not know processes or time limits (`reward_workers.py`), and imports
no jax, because reward workers import this module.
"""

import functools
import importlib
import importlib.util
import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from pat_jax.errors import UserError
from pat_jax.rl.tokenizer import Tokenizer
from pat_jax.rl.types import FinishReason, Prompt, Rollout

RewardFunction = Callable[..., Sequence[float]]
Column = TypeVar("Column")

_NUMBER = re.compile(
    r"(?:(?<![\w)}\]])-)?"  # a minus after an operand is a subtraction, not a sign
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:/\d+)?"
)


def exact_reward(
    prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[object]
) -> list[float]:
    """1 if the response ended and the text after its last `#` is the answer, else 0."""
    del prompts
    answers = _require_column("exact", "answer", columns)
    finishes = _require_column("exact", "finish", columns)
    return [
        float(finish == FinishReason.STOP and "#" in text and text.rpartition("#")[2] == answer)
        for text, answer, finish in zip(completions, answers, finishes, strict=True)
    ]


def math_reward(
    prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[object]
) -> list[float]:
    r"""1 if the last `\boxed{…}`, or without one the last number, has the answer's value, else 0."""
    del prompts
    answers = _require_column("math", "answer", columns)
    return [
        float(_has_value(text, str(answer)))
        for text, answer in zip(completions, answers, strict=True)
    ]


BUILT_IN: Mapping[str, RewardFunction] = {"exact": exact_reward, "math": math_reward}


def check_columns(spec: str, columns: Mapping[str, object]) -> None:
    """Refuses data without the column that a built-in reward compares with."""
    if spec in BUILT_IN:
        _require_column(spec, "answer", columns)


def resolve_reward(spec: str) -> RewardFunction:
    """The function that `exact`, `math`, `module:function` or `path/to/file.py:function` names."""
    if spec in BUILT_IN:
        if spec == "math":
            _parse_math("1/2")  # imports and builds its grammar now, not within a time limit
        return BUILT_IN[spec]
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise UserError(
            f"option --reward is {spec!r}: expected {', '.join(BUILT_IN)}, module:function or "
            "path/to/file.py:function; correct the option."
        )
    module = _import_source(source, spec)
    function: RewardFunction | None = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(
            f"reward {spec!r}: {source} has no function {name!r} (it has {', '.join(found) or 'none'})"
            f": expected one that takes prompts, completions and **columns; correct the name."
        )
    return function


@dataclass(frozen=True)
class Response:
    """What a reward function is told of one response."""

    prompt: str
    completion: str
    columns: Mapping[str, object]


def response_reader(
    prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> Callable[[Rollout], Response]:
    """Texts, columns of the data and `finish` of responses to some of `prompts`.

    A column that only some prompts have is None for the others.
    """
    names = sorted({name for prompt in prompts for name in prompt.columns})

    def read(rollout: Rollout) -> Response:
        has_eos = rollout.finish is FinishReason.STOP
        tokens = rollout.tokens[:-1] if has_eos else rollout.tokens
        columns = {name: rollout.prompt.columns.get(name) for name in names}
        return Response(
            rollout.prompt.text,
            tokenizer.decode(tokens.tolist()),
            columns | {"finish": rollout.finish},
        )

    return read


def _require_column(reward: str, name: str, columns: Mapping[str, Column]) -> Column:
    if name not in columns:
        raise UserError(
            f"reward {reward!r} needs the column {name!r} (the data has {', '.join(columns) or 'none'})"
            ": expected it in every row; add it to the data or choose another --reward."
        )
    return columns[name]


def _import_source(source: str, spec: str) -> ModuleType:
    is_file = source.endswith(".py")
    if is_file and not Path(source).is_file():
        raise UserError(
            f"reward {spec!r}: file {source} does not exist: expected a Python file; check the path."
        )
    try:
        return _import_file(Path(source)) if is_file else importlib.import_module(source)
    # Code of the user runs here and may raise anything.
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and source.startswith(error.name):
            raise UserError(
                f"reward {spec!r}: there is no module {error.name!r}: expected one that Python can "
                "import from this folder; check the name, or give path/to/file.py:function."
            ) from error
        raise UserError(
            f"reward {spec!r}: importing {source} raised {type(error).__name__} ({error}): expected "
            "a module that imports; correct it."
        ) from error


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    sys.path.insert(0, str(path.parent))  # its neighbours, as for a script that Python runs
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look their module up
    module_spec.loader.exec_module(module)
    return module


def _has_value(completion: str, answer: str) -> bool:
    found = _last_boxed(completion)
    if found is None:
        found = _last_number(completion)
    if found is None:
        return False
    if found.strip() == answer.strip():
        return True
    _, verify = _math_verify()
    return verify(_parse_math(answer), _parse_math(found), timeout_seconds=None)


def _last_boxed(text: str) -> str | None:
    r"""What the last complete `\boxed{…}` holds."""
    opening = r"\boxed{"
    start = text.rfind(opening)
    while start >= 0:
        depth = 1
        first = start + len(opening)
        for end in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[first:end]
        start = text.rfind(opening, 0, start)
    return None


def _last_number(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


@functools.lru_cache(maxsize=1024)  # a group shares its answer
def _parse_math(text: str) -> list:
    parse, _ = _math_verify()
    boxed = text if r"\boxed" in text else rf"\boxed{{{text}}}"
    return parse(boxed, parsing_timeout=None)


@functools.cache
def _math_verify() -> tuple[Callable, Callable]:
    """`parse` and `verify`, used without their time limits, which need the main thread's signals.

    The worker process that this runs in is killed instead, so its warning about that is silenced.
    """
    from math_verify import parse, verify  # two seconds to import, in workers only

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify
