"""Checks that token ids mean the same to a draft model as to the policy.

Knows tokenizers' files and sizes of embeddings. Does not know how a text becomes tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.common.hub import local_checkpoint
from pat_jax.models.checkpoints.json_fields import read_json_object
from pat_jax.models.config import ModelConfig

TOKENIZER_FILE = "tokenizer.json"
# Models with one tokenizer pad their embeddings to multiples of 64 to 512: those of Qwen2.5-7B have
# 152,064 rows, those of Qwen2.5-0.5B 151,936, and both tokenizers 151,665 tokens. If the vocabulary
# is small, so small a difference means other tokens.
PADDED_TO = 512
PADDED_FROM = 16 * 512


def other_tokens(
    own: ModelConfig,
    own_folder: str,
    policy: ModelConfig,
    policy_folder: str,
    kind: str = "draft model",
) -> str:
    """Returns why a draft model's token ids do not fit the policy's; empty if they do. Raises
    UserError if a tokenizer's file cannot be read.

    If both models have a tokenizer, the ids that both have are compared. Sizes of embeddings do not
    matter then. An id that only the policy has is never proposed. One that only the draft model has
    is never sampled. Without tokenizers, sizes may differ only by padding, see `is_padding_alone`.

    Args:
      own, own_folder: the draft model's configuration and checkpoint folder.
      policy, policy_folder: the same of the policy. Without a folder there is no tokenizer.
      kind: what the draft model is called in the message.
    """
    tokens, of_policy = tokens_in(own_folder), tokens_in(policy_folder)
    if tokens is None or of_policy is None:
        if is_padding_alone(own.vocab_size, policy.vocab_size):
            return ""
        return f"a {kind} with the policy's {policy.vocab_size} tokens, but this one has {own.vocab_size}"
    shared = tokens.keys() & of_policy.keys()
    if not shared:
        return f"a {kind} with the tokens of {policy_folder}, but they have no token id in common"
    first = min((i for i in shared if tokens[i] != of_policy[i]), default=None)
    if first is None:
        return ""
    return (
        f"a {kind} with the tokens of {policy_folder}, but token {first} is {of_policy[first]!r} there and "
        f"{tokens[first]!r} in the {kind}"
    )


def is_padding_alone(one: int, other: int) -> bool:
    """Returns whether two models with these numbers of embedding rows may have the same tokens.

    Their sizes must be equal, or differ by less than usual padding in a large vocabulary
    (`PADDED_TO`)."""
    return one == other or (abs(one - other) < PADDED_TO and min(one, other) >= PADDED_FROM)


def tokens_in(folder: str) -> Mapping[int, str] | None:
    """Returns the token of each id in a checkpoint's tokenizer, added tokens included. Returns None
    if there is no tokenizer file. Raises UserError if the file cannot be read."""
    path = Path(local_checkpoint(folder, weights=False)) / TOKENIZER_FILE
    if not path.is_file():
        return None
    told = read_json_object(path)
    try:
        return {number: token for token, number in _numbered(told)}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} lists no tokens with their ids: expected a vocabulary and added tokens in the format of Hugging "
            "Face tokenizers; download the file again."
        ) from None


def _numbered(told: Mapping[str, Any]) -> list[tuple[str, int]]:
    vocabulary = told["model"]["vocab"]
    if isinstance(vocabulary, list):  # a unigram model: tokens with their scores, in order of ids
        found = [(token, number) for number, (token, _) in enumerate(vocabulary)]
    else:
        found = list(vocabulary.items())
    return found + [(one["content"], one["id"]) for one in told.get("added_tokens") or ()]
