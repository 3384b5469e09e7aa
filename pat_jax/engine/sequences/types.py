"""The sampling options of all rows as arrays, and sets of tokens as bits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pat_jax.common.pytree import pytree_dataclass
from pat_jax.engine.sequences.sampling import MAX_STOP_IDS, Sampling
from pat_jax.engine.sequences.sequence_table import NO_TOKEN


@pytree_dataclass
class RowSampling:
    """The `Sampling` of every row as arrays, so that no value causes a compilation."""

    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    repetition_penalty: Float[Array, " rows"]
    presence_penalty: Float[Array, " rows"]
    may_end_at: Int[Array, " rows"]  # index in prompt + response of the first token that may end it
    stop_ids: Int[Array, "rows stop_ids"]  # NO_TOKEN where there are fewer
    wants_top: Bool[Array, " rows"]  # whether to report likeliest tokens

    @classmethod
    def empty(cls, rows: int) -> "RowSampling":
        """Returns host arrays for `rows` rows, with every option off."""

        def full(value: float, dtype: type = np.float32) -> Any:
            return np.full(rows, value, dtype)

        return cls(
            temperature=full(1),
            top_k=full(0, np.int32),
            top_p=full(1),
            min_p=full(0),
            repetition_penalty=full(1),
            presence_penalty=full(0),
            may_end_at=full(0, np.int32),
            stop_ids=np.full((rows, MAX_STOP_IDS), NO_TOKEN, np.int32),  # pyright: ignore[reportArgumentType]
            wants_top=full(False, bool),
        )

    def put(self, row: int, sampling: Sampling, prompt_length: int) -> None:
        """Fills in one row of host arrays."""
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.presence_penalty[row] = sampling.presence_penalty
        self.may_end_at[row] = min(prompt_length + sampling.min_tokens, 2**31 - 1)
        self.stop_ids[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.wants_top[row] = sampling.logprobs > 0


def token_set(tokens: np.ndarray | Sequence[int], vocab_size: int) -> np.ndarray:
    """Returns which tokens occur, uint32[⌈vocab / 32⌉]: token t is bit t mod 32 of word t // 32."""
    is_in = np.zeros(num_words(vocab_size) * 32, bool)
    is_in[np.asarray(tokens, np.int64)] = True
    return np.packbits(is_in, bitorder="little").view("<u4").astype(np.uint32)


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)
