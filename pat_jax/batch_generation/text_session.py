"""Generates text from text, any number of times: an engine's session with its tokenizer.

Prompts are parsed as lines of a prompts file are, and get the same samples. Does not know where
weights come from.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pat_jax.batch_generation.answers import Answer
from pat_jax.batch_generation.job import BatchJob
from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.prompts import GivenPrompts, PromptLike, Prompts
from pat_jax.batch_generation.result_file import ResultFile
from pat_jax.engine.record.trace import RolloutTrace
from pat_jax.engine.session import Session
from pat_jax.rl.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class TextSession:
    """Generates texts with an engine that is compiled and has its weights."""

    session: Session
    tokenizer: Tokenizer | None
    overrides: SamplingOverrides  # apply unless the arguments of `generate` set an option
    recommended: SamplingOverrides  # apply if neither `overrides` nor those arguments do
    seed: int

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
        given = GivenPrompts(prompts, sampling)
        kept = ResultFile(None, resume=False)
        job = self.job(given, kept)
        job.check()
        job.run()
        found: list[list[Answer]] = [[] for _ in given]
        for result in kept.read():
            found[result["line"] - 1].append(Answer(**result))
        return found

    def job(self, prompts: Prompts, results: ResultFile) -> BatchJob:
        """Returns a job that completes `prompts` and writes to `results`."""
        return BatchJob(
            prompts,
            self.seed,
            self.session,
            self.tokenizer,
            self.overrides,
            self.recommended,
            results,
        )

    @property
    def rollout(self) -> RolloutTrace:
        """The trace of the newest rollout: layouts, switches and running requests over time."""
        return self.session.report.trace
