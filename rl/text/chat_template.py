"""Renders chats with a checkpoint's chat template, in a process that may be killed.

Knows the process and its limits. Does not know tokens.
"""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pat_jax.rl.text.text_worker import Limits, TextWorker, WorkerDied, take

SECONDS, NUM_BYTES = 2.0, 2**30  # limits of rendering a text, which usually takes a thousandth
# Limit of the processor seconds for all texts together: BUDGET_S + EACH_S · number of texts.
BUDGET_S = 10.0
EACH_S = 0.05

# Arguments of a rendering that are not variables of the template.
_OURS = ("messages", "add_generation_prompt", "continue_final_message", "chat_template")


class ChatTemplateError(ValueError):
    """The error of a chat template that cannot render some messages, in one sentence."""


class ChatTemplate:
    """A chat template; it may be used by one thread at a time.

    Args:
      constants: the checkpoint's constants, such as its special tokens.
    """

    def __init__(
        self,
        template: str,
        constants: Mapping[str, Any],
        *,
        seconds: float = SECONDS,
        num_bytes: int = NUM_BYTES,
    ):
        self._template = template
        self._constants = dict(constants)
        self._limits = Limits(seconds, num_bytes)
        self._worker: TextWorker | None = None
        self._seconds = 0.0
        self._texts = 0  # time and number of all texts so far

    def check_variables(self, names: Iterable[str]) -> None:
        """Raises ChatTemplateError for a name that does not occur in the template."""
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
        """Returns the text that the policy reads. It ends where a new answer begins or where the
        assistant's last message continues; if `is_closed`, after the last message. Raises
        ChatTemplateError if the template refuses the messages, fails, or takes too long."""
        self._check_budget()
        given = [dict(message) for message in messages]
        is_begun = not is_closed and given[-1]["role"] == "assistant"
        how = {
            "add_generation_prompt": not is_closed and not is_begun,
            "continue_final_message": is_begun,
        }
        how = {**self._constants, **(variables or {}), **how}
        self._worker = worker = self._worker or take()
        worker.begin(self._limits, "render", self._template, how, given)
        try:
            text, error, seconds = worker.answer()
        except WorkerDied as death:
            self._seconds += self._limits.seconds
            raise self._died(death) from None
        self._seconds = self._seconds + seconds
        self._texts = self._texts + 1
        if text is None:
            reason = (error.strip().splitlines() or ["no reason"])[0][:200]
            raise ChatTemplateError(
                f"the chat template fails ({reason}): expected messages that it is for; correct "
                "them, or the template."
            )
        return text

    def _check_budget(self) -> None:
        """Raises ChatTemplateError if all texts together take too long."""
        if self._seconds > BUDGET_S + EACH_S * self._texts:
            raise ChatTemplateError(
                f"the chat template has worked for {self._seconds:.0f} s on {self._texts} texts: expected less "
                f"than {EACH_S:g} s for each; correct the template or the messages."
            )

    def _died(self, death: WorkerDied) -> ChatTemplateError:
        """Returns the error for a process that died; the next text gets a new process."""
        self._worker = None
        if death.code == -signal.SIGPROF:
            what = f"works for more than {self._limits.seconds:g} s"
        else:
            what = f"ends its process with code {death.code}"
        return ChatTemplateError(
            f"the chat template {what}: expected a text at once; correct the template or the "
            "messages."
        )
