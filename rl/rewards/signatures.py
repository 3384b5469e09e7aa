"""Calls a reward function by one of two conventions, told apart by its parameters' names.

    fn(prompts, completions, **columns) -> [number, …]
        this project and TRL: called once per group
    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number or dict
        verl: called once per response

The first gets chats as texts, or as messages if it is written for these, as TRL passes them: its
annotation of `completions` has dictionaries, or it fails on texts and reads messages' content.

Both may be `async`; all calls of a process share one event loop, as clients of services need. A
function gets the arguments that it names: texts, `completion_ids`, `prompt_ids`, `is_thinking`, and
columns of the data; with `**columns` all columns. Knows names and arguments. Does not know what may
be returned (`outcome.py`), nor processes.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.outcome import Outcome, read_results, read_scores
from pat_jax.rl.rewards.responses import Response

Function = Callable[..., Any]

_MARK = "solution_str"  # a parameter of this name marks verl's convention
# What a function raises that takes a text for a list of messages.
_NO_MESSAGES = (TypeError, IndexError, KeyError, AttributeError)


class _Message(dict[str, Any]):
    """A message of a chat, which notes whether its content was read."""

    is_read = False

    def __getitem__(self, key: str) -> Any:
        self.is_read |= key == "content"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.is_read |= key == "content"
        return super().get(key, default)


@dataclass(frozen=True)
class _Chats:
    """Prompts and completions as messages, as TRL passes them."""

    prompts: list[list[_Message]]
    completions: list[list[_Message]]

    @classmethod
    def of(cls, responses: Sequence[Response]) -> "_Chats":
        answers = [_Message(role="assistant", content=one.completion) for one in responses]
        prompts = [list(map(_Message, one.messages)) for one in responses]
        return cls(prompts, [[answer] for answer in answers])

    @property
    def are_read(self) -> bool:
        return any(one.is_read for chat in (*self.prompts, *self.completions) for one in chat)


class Recognised:
    """Calls a reward function on the responses of a group, with the arguments that its signature
    names.

    Args:
      spec: the function's name in messages.
    """

    def __init__(self, function: Function, spec: str):
        self._function = function
        self._spec = spec
        self.loop = asyncio.Runner()
        try:
            self._signature = inspect.signature(function)
        except ValueError:  # compiled code that does not say
            self._signature = None
        self._known = self._signature.parameters if self._signature else {}
        annotation = self._known["completions"].annotation if "completions" in self._known else ""
        self._takes_messages = "dict" in str(annotation).lower()

    def __call__(self, responses: Sequence[Response]) -> Outcome:
        """Scores responses. Raises UserError if an argument is missing.

        Exceptions of a function that is called per group pass through."""
        if _MARK in self._known:
            return self._one_by_one(responses)
        return self._together(responses)

    def _together(self, responses: Sequence[Response]) -> Outcome:
        """Calls the function once for a group of responses, which it may compare."""
        chats = _Chats.of(responses) if responses[0].messages else None
        if chats is None or self._takes_messages:
            return self._scored(responses, chats)
        try:
            return self._scored(responses, None)
        except _NO_MESSAGES as error:
            try:
                outcome = self._scored(responses, chats)
            except Exception:
                raise error from None
            if not chats.are_read:  # a mistake of its own, which lists of messages hide
                raise
            self._takes_messages = True
            return outcome

    def _scored(self, responses: Sequence[Response], chats: "_Chats | None") -> Outcome:
        columns = {name: [one.columns[name] for one in responses] for name in responses[0].columns}
        texts = {
            "prompts": chats.prompts if chats else [one.prompt for one in responses],
            "completions": chats.completions if chats else [one.completion for one in responses],
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
        """Calls the function once for each response; `async` calls run concurrently."""
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
        """Returns the arguments that the function names, or all of `given` if it has `**columns`.
        Raises UserError if the function needs an argument that does not exist."""
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
        """Returns the function's result or exception, so that other responses are still scored."""
        try:
            return self._function(**arguments)
        # Code of the user may raise anything.
        except Exception as error:
            return error


def _ground_truth(columns: Mapping[str, object]) -> dict[str, object]:
    """Returns the ground truth in `reward_model`, as in verl's data, else the answer column."""
    model = columns.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return {"ground_truth": model["ground_truth"]}
    found = [columns[name] for name in ("ground_truth", "answer") if name in columns]
    return {"ground_truth": found[0]} if found else {}


async def _wait_for(scores: object) -> object:
    return await scores  # pyright: ignore[reportGeneralTypeIssues]


async def _gather(results: Sequence[Any]) -> list[object]:
    """Awaits all awaitables together; other values stay as they are."""

    async def settled(result: Any) -> object:
        return await result if inspect.isawaitable(result) else result

    return await asyncio.gather(*map(settled, results), return_exceptions=True)
