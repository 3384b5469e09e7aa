"""How a reward function wants to be called, told by the names of its parameters.

    fn(prompts, completions, **columns) -> [number, …]          this project's and TRL's: once a
    group compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number or dict
    verl's: once a response

Either may be `async`; all calls of a process share one event loop, as clients of services need. A
function is told what it names: texts, `completion_ids`, `prompt_ids`, `is_thinking`, and columns of
the data; with `**columns` all columns. Knows names and arguments. Does not know what may be
returned (`results.py`), nor processes.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.outcome import Outcome
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.results import read_results, read_scores

Function = Callable[..., Any]

_MARK = "solution_str"  # no group's function has a parameter of this name


class Recognised:
    """A function as it is called for the responses of a group.

    Args:
      spec: its name in messages.
    """

    def __init__(self, function: Function, spec: str):
        self._function, self._spec, self.loop = function, spec, asyncio.Runner()
        try:
            self._signature = inspect.signature(function)
        except ValueError:  # compiled code that does not say
            self._signature = None
        self._known = self._signature.parameters if self._signature else {}

    def __call__(self, responses: Sequence[Response]) -> Outcome:
        """Raises UserError where an argument is missing, and whatever a group's function raises."""
        if _MARK in self._known:
            return self._one_by_one(responses)
        return self._together(responses)

    def _together(self, responses: Sequence[Response]) -> Outcome:
        """One call for a group of responses, which the function may compare."""
        columns = {name: [one.columns[name] for one in responses] for name in responses[0].columns}
        texts = {
            "prompts": [one.prompt for one in responses],
            "completions": [one.completion for one in responses],
        }
        tokens = {
            "prompt_ids": [list(one.prompt_ids) for one in responses],
            "completion_ids": [list(one.completion_ids) for one in responses],
            "is_thinking": [one.is_thinking for one in responses],
        }
        scores = self._function(**self._bind(texts | columns, tokens))
        if inspect.isawaitable(scores):
            scores = self.loop.run(_wait_for(scores))
        return read_scores(scores, len(responses))

    def _one_by_one(self, responses: Sequence[Response]) -> Outcome:
        """One call for each response; those of an `async` function wait beside each other."""
        calls = [self._arguments(response) for response in responses]
        results = [self._result(arguments) for arguments in calls]
        if any(map(inspect.isawaitable, results)):
            results = self.loop.run(_gather(results))
        return read_results(results)

    def _arguments(self, response: Response) -> dict[str, Any]:
        columns = response.columns
        given = {
            "data_source": columns.get("data_source"),
            "solution_str": response.completion,
            "extra_info": columns.get("extra_info"),
            **_ground_truth(columns),
        }
        others = {key: value for key, value in columns.items() if key not in given}
        return self._bind(given, others)

    def _bind(self, given: Mapping[str, object], more: Mapping[str, object]) -> dict[str, Any]:
        """The arguments that the function names; of `given` all, if it takes any (`**columns`).

        Raises:
          UserError: it needs one that there is not.
        """
        if self._signature is None:
            return dict(given)
        takes_any = any(one.kind is one.VAR_KEYWORD for one in self._known.values())
        wanted = {key: value for key, value in given.items() if takes_any or key in self._known}
        wanted |= {key: value for key, value in more.items() if key in self._known}
        try:
            self._signature.bind(**wanted)
        except TypeError as error:
            raise UserError(
                f"reward {self._spec!r} cannot be called ({error}): expected a function of some of "
                f"{', '.join([*given, *more])}, or of **columns; correct its arguments or the data's "
                "columns."
            ) from error
        return wanted

    def _result(self, arguments: Mapping[str, Any]) -> object:
        """What the function returns, or the error that it raises: other responses are scored."""
        try:
            return self._function(**arguments)
        # Code of the user may raise anything.
        except Exception as error:
            return error


def _ground_truth(columns: Mapping[str, object]) -> dict[str, object]:
    """As in verl's rows, where it stands in `reward_model`; in others their answer."""
    model = columns.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return {"ground_truth": model["ground_truth"]}
    found = [columns[name] for name in ("ground_truth", "answer") if name in columns]
    return {"ground_truth": found[0]} if found else {}


async def _wait_for(scores: object) -> object:
    return await scores  # pyright: ignore[reportGeneralTypeIssues]


async def _gather(results: Sequence[Any]) -> list[object]:
    """What awaitables come to; what is none stays as it is."""

    async def settled(result: Any) -> object:
        return await result if inspect.isawaitable(result) else result

    return await asyncio.gather(*map(settled, results), return_exceptions=True)
