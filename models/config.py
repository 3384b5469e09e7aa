"""The shape of a model: one configuration that Llama, Qwen2.5 and Qwen3 specialise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Fields that say how arrays are padded, which is for the devices at hand. What is saved has zeros there.
PADDING = ("vocab_multiple", "query_multiple")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of low rotary frequencies (`rope_type: llama3` in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    architecture: (
        str  # "llama", "qwen2" or "qwen3": the Hugging Face model type it is written back as
    )
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    attention_bias: bool = False  # Qwen2.5: biases on the query, key and value projections
    qk_norm: bool = False  # Qwen3: RMS norm of each query and key head
    tie_embeddings: bool = False
    # Tokens of the longest sequence, prompt and response, that rotary positions are good for, their
    # scaling included: 131,072 of Llama 3.1, first trained with 8,192; 40,960 of Qwen3 as it comes.
    max_position: int = 32_768
    vocab_multiple: int = 128  # embedding rows are padded to it, alike in every layout
    query_multiple: int = 1  # and the query heads of a KV head, with heads that add nothing

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}."
            )

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def padded_queries_per_kv(self) -> int:
        return math.ceil(self.queries_per_kv / self.query_multiple) * self.query_multiple

    @property
    def padded_num_heads(self) -> int:
        return self.num_kv_heads * self.padded_queries_per_kv

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    def unpadded(self, shape: Sequence[int], axes: Sequence[str | None]) -> tuple[int, ...]:
        """The shape of a parameter, whose axes have these names, without what pads it."""
        sizes = {"vocab": self.vocab_size, "queries_per_kv": self.queries_per_kv}
        return tuple(sizes.get(axis or "", size) for size, axis in zip(shape, axes, strict=True))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers, at two bytes a number."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim
