"""Reads files of recorded responses: one row per response, with its prompt and its tokens or text.

Files of `python -m pat_jax.generate` can be read as they are. Knows fields and what can be wrong
with them. Does not know what is counted in them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from pat_jax.common.errors import UserError, shown
from pat_jax.layout.buckets import Drafts, Pace
from pat_jax.profiling.capacity.replay_options import ReplayOptions
from pat_jax.profiling.simulate.draft_counting import Group, Tokens
from pat_jax.profiling.simulate.draft_sources import DraftSources
from pat_jax.profiling.simulate.length_files import find_lengths
from pat_jax.profiling.simulate.response_lengths import ResponseLengths
from pat_jax.rl.data.row_files import Record, listed, read_records

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
TOKENS, TEXTS = ("token_ids", "tokens"), ("text", "response")
# The fields that identify the prompt of a row; the first that it has counts.
PROMPTS = ("prompt_id", "line", "id", "prompt")
PROMPT_TOKENS = "prompt_token_ids"
LENGTHS = "reasoning"  # if nothing else is given
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class RecordedResponses:
    """The recorded responses that have a token, by prompt."""

    path: Path
    groups: tuple[Group, ...]

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def lengths(self) -> ResponseLengths:
        """The lengths of the newest responses."""
        pairs = sorted((len(text), len(x.prompt)) for x in self.groups for text in x.responses)
        tokens, prompts = np.array(pairs).T
        source = f"{self.name}, {len(tokens):,} responses"
        known = prompts if (prompts > 0).all() else None
        return ResponseLengths(source, tokens, np.ones(len(tokens)), known)


def lengths_of(config: ReplayOptions, recorded: RecordedResponses | None) -> ResponseLengths:
    """The lengths of `--lengths`; without that option those recorded, or else built-in ones."""
    if recorded and not config.lengths:
        return recorded.lengths
    return find_lengths(config.lengths or LENGTHS)


def sources_of(
    config: ReplayOptions, recorded: RecordedResponses | None, drafts: Drafts, least: int
) -> DraftSources | None:
    """The sources of drafts in the requested rollouts; None: there are no drafts.

    Args:
      least: tokens of the shortest length bucket.
    """
    if not drafts.num_draft_tokens:
        return None
    if drafts.is_generated:
        return DraftSources.generated(config.speculation.source, config.draft_acceptance)
    found = DraftSources.built_in()
    if recorded:
        steps = Pace.of(config.check_every, config.burst_steps, drafts.longest).burst_steps
        found = DraftSources.counted(recorded.name, recorded.groups, drafts, steps, least)
    return found.within(drafts, config.num_generations)


def read_responses(path: Path, vocab_size: int, encode: Encode | None) -> RecordedResponses:
    """Reads a file of recorded responses.

    Args:
      vocab_size: number of tokens in the policy's vocabulary.
      encode: turns text into tokens; None: there is no tokenizer.

    Raises:
      UserError: the file cannot be read, has a row that is not a response, or none with a token.
    """
    if not path.is_file() or path.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"option --responses_file is {str(path)!r}: expected a file named {', '.join(SUFFIXES)}, of "
            "one response a row; check the name, or leave it out for what is built in."
        )
    reader = _Reader(vocab_size, encode)
    responses_of = defaultdict[str, defaultdict[int, list[Tokens]]](lambda: defaultdict(list))
    prompts: dict[str, Tokens] = {}
    records = read_records(path, of="responses")
    for row in records:
        if row.fields.get("error") or row.fields.get("finish_reason") == "error":
            continue
        prompt, response = reader.prompt_of(row), reader.response(row)
        if len(response):
            responses_of[prompt][reader.epoch(row)].append(response)
            if prompt not in prompts:
                prompts[prompt] = reader.prompt_tokens(row)
    if not responses_of:
        raise UserError(
            f"option --responses_file is {str(path)!r}: none of its {len(records):,} rows has a response "
            "with a token, expected some; check what wrote it."
        )
    groups = [_group(prompts[name], by_epoch) for name, by_epoch in responses_of.items()]
    return RecordedResponses(path, tuple(groups))


def _group(prompt: Tokens, by_epoch: Mapping[int, list[Tokens]]) -> Group:
    newest, *before = sorted(by_epoch, reverse=True)
    return Group("", prompt, by_epoch[newest], [x for epoch in before for x in by_epoch[epoch]])


@dataclass(frozen=True)
class _Reader:
    vocab_size: int
    encode: Encode | None

    def prompt_of(self, row: Record) -> str:
        name = next((name for name in PROMPTS if row.fields.get(name) is not None), None)
        if name is None:
            raise UserError(
                f"{row.where}, has the fields {listed(row.fields)}: expected one of {', '.join(PROMPTS)} that "
                "says which responses have the same prompt; add it to every row."
            )
        return repr(row.fields[name])

    def response(self, row: Record) -> Tokens:
        for name in (*TOKENS, *TEXTS):
            if row.fields.get(name) is not None:
                return self._tokens(row, name) if name in TOKENS else self._encoded(row, name)
        raise UserError(
            f"{row.where}, has the fields {listed(row.fields)}: expected the response as "
            f"{' or '.join(TOKENS)} (token ids) or {' or '.join(TEXTS)}; add one of them."
        )

    def prompt_tokens(self, row: Record) -> Tokens:
        """The prompt's tokens; empty if they are not known."""
        if row.fields.get(PROMPT_TOKENS) is not None:
            return self._tokens(row, PROMPT_TOKENS)
        is_text = isinstance(row.fields.get("prompt"), str)
        return self._encoded(row, "prompt") if is_text and self.encode else ()

    def epoch(self, row: Record) -> int:
        value = row.fields.get("epoch", 0)
        if isinstance(value, bool) or not isinstance(value, int):
            raise row.complain("epoch", value, "a whole number, larger for a newer policy")
        return value

    def _tokens(self, row: Record, name: str) -> Tokens:
        value = row.fields[name]
        if not isinstance(value, list):
            raise row.complain(name, value, "a list of token ids")
        for token in value:
            is_id = isinstance(token, int) and not isinstance(token, bool)
            if not is_id or not 0 <= token < self.vocab_size:
                raise UserError(
                    f"{row.where}, field {name!r}, has the token {shown(token)}: expected ids from 0 to "
                    f"{self.vocab_size - 1:,}, the policy's; give responses in its vocabulary."
                )
        return value

    def _encoded(self, row: Record, name: str) -> Tokens:
        text = row.fields[name]
        if not isinstance(text, str):
            raise row.complain(name, text, "a text")
        if self.encode is None:
            raise UserError(
                f"{row.where}, has no {' or '.join(TOKENS)}, and there is no tokenizer for its {name}: expected "
                "token ids; add them, or use plan with --model DIR, a checkpoint with a tokenizer."
            )
        return self.encode(text)
