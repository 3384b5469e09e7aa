"""Rewards: `fn(prompts, completions, **columns) -> list[float]`, built in or the user's.

`prompts` and `completions` are texts, one of each a response; `columns` are the other columns of
the data as lists of the same length, and `finish_reason`, the `FinishReason` of each response.

Knows names and texts. Does not know processes or time limits (`reward_workers.py`), and imports
no jax, because reward workers import this module.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pat_jax.common.errors import UserError
from pat_jax.rl.built_in_rewards import BUILT_IN, MATH, RewardFunction
from pat_jax.rl.math_value import same_value
from pat_jax.rl.tokenizer import Tokenizer
from pat_jax.rl.types import FinishReason, Prompt, Rollout


def resolve_reward(spec: str) -> RewardFunction:
    """The function that `exact`, `math`, `module:function` or `path/to/file.py:function` names."""
    if spec in BUILT_IN:
        if spec in MATH:
            same_value("1/2", "0.5")  # imports and builds its grammar now, not within a time limit
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


def response_reader(names: Sequence[str], tokenizer: Tokenizer) -> Callable[[Rollout], Response]:
    """Texts, columns of the data and `finish_reason` of responses.

    Args:
      names: of all columns that any prompt has; one is None where the prompt has it not.
    """

    def read(rollout: Rollout) -> Response:
        has_eos = rollout.finish is FinishReason.STOP
        tokens = rollout.tokens[:-1] if has_eos else rollout.tokens
        text = tokenizer.decode(tokens.tolist())
        return _response(rollout.prompt, names, text, rollout.finish)

    return read


def trial_responses(prompt: Prompt, names: Sequence[str]) -> list[Response]:
    """Made-up responses, with columns as of `response_reader`: nothing, and the answer in the usual
    forms."""
    answer = prompt.columns.get("answer", "1")
    right = f"<answer>{answer}</answer>\nThe answer is \\boxed{{{answer}}}.\n#### {answer}"
    return [_response(prompt, names, text, FinishReason.STOP) for text in ("", right)]


def _response(
    prompt: Prompt, names: Sequence[str], completion: str, finish: FinishReason
) -> Response:
    columns = {name: prompt.columns.get(name) for name in names}
    return Response(prompt.text, completion, columns | {"finish_reason": finish})


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
