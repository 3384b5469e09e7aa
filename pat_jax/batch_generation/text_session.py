"""Generates text from text, any number of times: an engine's session with its tokenizer.

Prompts are parsed as lines of a prompts file are, and get the same samples. Does not know where
weights come from.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from pat_jax.batch_generation.answers import Answer, describe
from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.prompt_lines import LineRequest, parse_ask
from pat_jax.batch_generation.prompts import GivenPrompts, PromptLike
from pat_jax.common.bars import bar
from pat_jax.common.errors import UserError
from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.session import Session
from pat_jax.rl.text.tokenizer import Tokenizer


class TextSession:
    """Generates texts with an engine that is compiled and has its weights."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer | None,
        overrides: SamplingOverrides,
        recommended: SamplingOverrides,
        seed: int,
    ):
        """
        Args:
          overrides: sampling options that apply unless the arguments of `generate` set them.
          recommended: sampling options that apply if neither `overrides` nor those arguments do.
        """
        self.session = session
        self.tokenizer = tokenizer
        self.seed = seed
        self._overrides = overrides
        self._recommended = recommended

    def generate(self, prompts: str | Iterable[PromptLike], **sampling: Any) -> list[list[Answer]]:
        """Returns the samples of each prompt: the same as for prompts in the lines of a file.

        Args:
          prompts: texts to continue, chats, token ids, or lines of a prompts file as dictionaries.
            A dictionary's own sampling options win.
          sampling: options under the names that lines use: `n`, `max_tokens`, `temperature`,
            `top_p`, `stop`, `seed`, `logprobs` …

        Raises:
          UserError: a prompt is invalid; one sentence about the first. Nothing is generated.
        """
        asks = [self._ask(i, line) for i, line in GivenPrompts(prompts, sampling)]
        owners = [(i, sample) for i, ask in enumerate(asks) for sample in range(ask.num_samples)]
        requests = [self._request(asks[i], i + 1, sample) for i, sample in owners]
        finders = [asks[i].finder(self.tokenizer) for i, _ in owners]

        def watch(i: int, tokens: np.ndarray) -> bool:
            finder = finders[i]
            return finder is not None and finder.has_stopped(tokens)

        found: list[list[Answer]] = [[] for _ in asks]
        names = [f"prompt {i + 1}" for i, _ in owners]
        stream = self.session.stream(requests, watch=watch, name=lambda i: names[i])
        done = dict(bar(stream, total=len(requests), unit="response"))
        for k, (i, _) in enumerate(owners):
            wants = asks[i].wants_logprobs
            fields = describe(done[k], self.tokenizer, finders[k], wants_logprobs=wants)
            found[i].append(Answer(**fields))
        return found

    @property
    def rollout(self) -> RolloutTrace:
        """The trace of the newest rollout: layouts, switches and running requests over time."""
        return self.session.report.trace

    def _ask(self, number: int, line: dict[str, Any]) -> LineRequest:
        try:
            return parse_ask(
                line,
                self._overrides,
                self._recommended,
                self.tokenizer,
                max_length=self.session.max_length,
            )
        except ValueError as error:
            raise UserError(f"prompt {number}: {error}") from None

    def _request(self, ask: LineRequest, number: int, sample: int) -> Request:
        request = ask.request(self.seed, number, sample)
        if complaint := self.session.complaint(request):
            raise UserError(f"prompt {number}: {complaint}")
        return request
