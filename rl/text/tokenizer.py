"""The interface of tokenizers, and the tokenizer of a Hugging Face checkpoint.

Knows files of tokenizers and chat templates. Does not know models: `check_vocabulary` gets the
number of embedding rows.
"""

import importlib.util
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pat_jax.common.errors import UserError
from pat_jax.rl.text.chat_template import ChatTemplate, ChatTemplateError
from pat_jax.rl.text.special_tokens import (
    GENERATION_CONFIG,
    MODEL_CONFIG,
    SpecialTokens,
    named_eos_ids,
)
from pat_jax.rl.text.tokenizer_trial import TokenizerTrial

ChatMessage = Mapping[str, Any]  # {"role": text, "content": text}, and other keys of the template
PromptText = str | Sequence[ChatMessage]

ASSISTANT = "assistant"  # the role of the policy
NO_TEMPLATE = (
    "to set tools or chat_template_kwargs of: expected rows without them; remove the columns, or use a "
    "checkpoint with a template."
)
# The tokenizer of a model without one: tokens are the text's bytes in UTF-8; the end token is 256.
BYTE_TOKENIZER = Path(__file__).parent / "byte_tokenizer"
NUM_BYTE_TOKENS = 257
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


@runtime_checkable  # for the type checks of the tests
class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """One more than the largest token id: the embedding rows that the tokenizer needs."""
        ...

    @property
    def checksum(self) -> int:
        """A checksum of the vocabulary: of the text of each token id."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends a response."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of the text alone, without special tokens before or after it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text, without special tokens unless the tokenizer is set to keep them."""
        ...

    def encode_prompt(
        self, prompt: PromptText, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Returns the tokens of a prompt, after which the response begins. The chat template is
        applied, if there is one; `variables` override the template's variables for all prompts.
        Raises ChatTemplateError if the template cannot render the prompt."""
        ...


def is_message(value: object) -> bool:
    keys = ("role", "content")
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in keys)


def flatten_messages(prompt: PromptText) -> str:
    """Returns a prompt as a plain text: the contents of its messages, without roles."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message["content"] for message in prompt)


@dataclass(frozen=True)
class Chat:
    """Settings for every prompt that a chat template renders."""

    system_prompt: str = ""  # system message for prompts without one
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the template by name


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face checkpoint directory, read from local files only."""

    def __init__(
        self, directory: str | Path, chat: Chat | None = None, *, skip_special_tokens: bool = True
    ):
        """
        Args:
          skip_special_tokens: whether `decode` drops special tokens.
        """
        self.chat = chat or Chat()
        self._skips_special = skip_special_tokens
        self.directory = Path(directory)
        self._tokenizer = _load_auto_tokenizer(self.directory)
        self.eos_ids = self._find_eos_ids()
        self.note = ""  # for the user, on how responses end
        pad_id = self._tokenizer.pad_token_id
        self.pad_id: int = self.eos_ids[0] if pad_id is None else pad_id
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.has_chat_template = bool(self._tokenizer.chat_template)
        if self.has_chat_template:
            self._template = self._load_template()
        elif self.chat != Chat():
            raise UserError(
                f"{self.directory} has no chat template: expected neither a system prompt nor "
                "chat_template_kwargs; leave them out, or use a checkpoint with a template."
            )

    def _load_template(self) -> ChatTemplate:
        if importlib.util.find_spec("jinja2") is None:
            raise UserError(
                f"{self.directory} has a chat template, which needs the package jinja2: run "
                "`pip install jinja2`."
            )
        try:
            template = self._tokenizer.get_chat_template()
        except ValueError as error:  # there are several templates, and none is the default
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
            raise UserError(f"{self.directory}: {reason} Expected one chat template.") from None
        found = ChatTemplate(template, self._tokenizer.special_tokens_map)
        try:
            found.check_variables(self.chat.variables)
        except ChatTemplateError as error:
            raise UserError(f"{self.directory}: {error}") from None
        return found

    def _find_eos_ids(self) -> tuple[int, ...]:
        own = self._tokenizer.eos_token_id
        ids = [] if own is None else [own]
        ids += [token for token in named_eos_ids(self.directory) if token not in ids]
        if not ids:
            raise UserError(
                f"{self.directory} names no end-of-sequence token: expected eos_token in "
                f"tokenizer_config.json, or eos_token_id in {GENERATION_CONFIG} or {MODEL_CONFIG}; add one "
                "of them."
            )
        return tuple(ids)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        # Cleaning up spaces would change what the policy wrote.
        return self._tokenizer.decode(
            [int(token) for token in tokens],
            skip_special_tokens=self._skips_special,
            clean_up_tokenization_spaces=False,
        )

    def encode_text(self, text: str) -> list[int]:
        """Returns the tokens of a text to continue, without a chat template.

        Unlike `encode`, it keeps the beginning-of-sequence token that the tokenizer adds and that a
        base model expects, unless the text begins with this token.
        """
        return self.special.begun_once(self._tokenizer.encode(text))

    def encode_chat(self, text: str) -> list[int]:
        """Returns the tokens of a rendered chat, with at most one beginning-of-sequence token.

        The template may write such a token, and the first message may begin with another."""
        return self.special.begun_once(self.encode(text))

    @cached_property
    def special(self) -> SpecialTokens:
        return SpecialTokens.of(self._tokenizer)

    @cached_property
    def is_bytes(self) -> bool:
        """Whether this is the byte tokenizer, read from any directory."""
        text = bytes(range(128)).decode()
        return self.vocab_size == NUM_BYTE_TOKENS and self.encode(text) == list(range(128))

    @cached_property
    def dropped(self) -> Mapping[int, str]:
        """Texts, by id, of special tokens that `decode` drops, except begin, end and padding."""
        usual = {*self.eos_ids, self.pad_id, *self.special.beginning}
        texts = self.special.texts if self._skips_special else {}
        return {token: text for token, text in texts.items() if token not in usual}

    @property
    def checksum(self) -> int:
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        return zlib.crc32(json.dumps(vocabulary).encode())

    @property
    def eos_texts(self) -> tuple[str, ...]:
        """The texts of the tokens in `eos_ids`."""
        return self.texts_of(self.eos_ids)

    def texts_of(self, tokens: Sequence[int]) -> tuple[str, ...]:
        return tuple(filter(None, self._tokenizer.convert_ids_to_tokens(list(tokens))))

    def encode_prompt(
        self, prompt: PromptText, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        if not self.has_chat_template:
            self.check_template(variables)
            return self.encode_text(flatten_messages(prompt))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.encode_chat(self.chat_text(messages, variables))

    def check_template(self, variables: Mapping[str, Any] | None) -> None:
        """Raises ChatTemplateError for variables without a template."""
        if variables and not self.has_chat_template:
            raise ChatTemplateError(f"{self.directory} has no chat template {NO_TEMPLATE}")

    def chat_text(
        self,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, Any] | None = None,
        *,
        is_closed: bool = False,
    ) -> str:
        """Returns messages rendered by the chat template; see `ChatTemplate.render`. If the
        template refuses a system message, its text is put before the first user message."""
        if self.chat.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.chat.system_prompt}, *messages]
        self._template.check_variables(variables or {})
        given = {**self.chat.variables, **(variables or {})}
        try:
            return self._template.render(messages, given, is_closed=is_closed)
        except ChatTemplateError:
            if [each["role"] for each in messages[:2]] != ["system", "user"]:
                raise
            messages = [{**messages[1], "content": flatten_messages(messages[:2])}, *messages[2:]]
            return self._template.render(messages, given, is_closed=is_closed)


def check_vocabulary(tokenizer: Tokenizer, num_embeddings: int, *, source: str = "") -> None:
    """Raises UserError if an id of the tokenizer has no row in an embedding.

    Args:
      num_embeddings: number of rows of the embedding.
      source: the checkpoint directory, for the error message.
    """
    largest = tokenizer.vocab_size - 1
    if largest >= num_embeddings:
        raise UserError(
            f"{source}{': ' if source else ''}the tokenizer's largest token id is {largest}, but the "
            f"model has {num_embeddings} embedding rows (vocab_size in config.json): expected at "
            f"least {largest + 1}; use the tokenizer that belongs to this model."
        )
    for token in tokenizer.eos_ids:
        if not 0 <= token < num_embeddings:
            raise UserError(
                f"{source}{': ' if source else ''}the end-of-sequence token {token} has none of the "
                f"model's {num_embeddings} embedding rows: expected a token id below that; correct "
                f"eos_token_id in {GENERATION_CONFIG} or {MODEL_CONFIG}."
            )


def has_tokenizer(directory: Path) -> bool:
    """Whether the directory has files of a tokenizer."""
    return any((directory / name).is_file() for name in _VOCABULARY_FILES)


def _load_auto_tokenizer(directory: Path):
    # Without these files transformers would invent a tokenizer of one token from config.json.
    if not has_tokenizer(directory):
        what = "has no tokenizer files" if directory.is_dir() else "does not exist"
        raise UserError(
            f"tokenizer directory {directory} {what}: expected a folder with tokenizer.json; check "
            "the path, or copy the file from the model's release."
        )
    trial = TokenizerTrial(directory)
    # Silences the warning that PyTorch is missing: it is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer  # takes seconds, and only checkpoints need it

    if problem := trial.problem():
        raise UserError(
            f"no tokenizer could be read from {directory} ({problem}): expected intact tokenizer.json and "
            "tokenizer_config.json, and no code to be run; copy them from the model's release."
        )
    # Code in a checkpoint is never run, and the user is not asked about it.
    return AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )
