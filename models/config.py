"""The shape of a model: one configuration for Llama, Qwen2.5, Qwen3, Mixtral and BigMac."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Head = Literal["vocab", "scalar"]

VOCAB_BLOCK = 128  # most tokens of a block of the vocabulary; drawing a token chooses a block first
# Fields that say how arrays are padded for the devices at hand. Saved arrays have zeros as padding.
PADDING = ("vocab_multiple", "query_multiple")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of low rotary frequencies (`rope_type: llama3` in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ExpertsConfig:
    """The shape of a mixture of experts, which replaces a layer's MLP. A few of the layer's experts
    compute each token."""

    num_experts: int
    num_experts_per_tok: int
    expert_dim: int  # number of hidden units of an expert
    # Whether the weights of a token's chosen experts sum to 1; else those of all experts do.
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()  # layers that have an MLP of `mlp_dim` and no experts
    # Width of the experts' inputs and outputs if it is less than `embed_dim` (BigMac, arXiv
    # 2502.16927), else 0.
    latent_dim: int = 0


@dataclass(frozen=True)
class ModelConfig:
    # The Hugging Face model type of exported checkpoints: "llama", "qwen2", "qwen3", "qwen3_moe",
    # "mixtral" or "bigmac", which transformers does not have.
    architecture: str
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
    # What the model predicts at each position: logits of the vocabulary, or one number (a reward
    # model, a critic).
    head: Head = "vocab"
    head_bias: bool = False  # whether a scalar head has a bias
    # Most tokens of a sequence (prompt and response) that the scaled rotary positions support:
    # 131,072 for Llama 3.1 (first trained with 8,192), 40,960 for Qwen3 as published.
    max_position: int = 32_768
    experts: ExpertsConfig | None = None
    vocab_multiple: int = VOCAB_BLOCK  # the embedding's rows are padded to a multiple of this
    query_multiple: int = 1  # query heads per KV head are padded with zeros to a multiple of this

    def is_sparse(self, layer: int) -> bool:
        """Whether layer number `layer` has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(layer for layer in range(self.num_layers) if self.is_sparse(layer))

    @property
    def expert_embed_dim(self) -> int:
        """Width of the experts' inputs and outputs."""
        return (self.experts and self.experts.latent_dim) or self.embed_dim

    @property
    def has_mlp(self) -> bool:
        """Whether some layer has an MLP of `mlp_dim`."""
        return len(self.sparse_layers) < self.num_layers

    @property
    def routes_shape(self) -> tuple[int, int]:
        """Shape of one token's chosen experts: (layers with experts, experts per token)."""
        return len(self.sparse_layers), self.experts.num_experts_per_tok if self.experts else 0

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

    @property
    def head_outputs(self) -> int:
        """Number of outputs of the head for each token, without padding of the vocabulary."""
        return self.vocab_size if self.head == "vocab" else 1

    @property
    def padded_head_outputs(self) -> int:
        """Number of outputs of the head for each token, with padding of the vocabulary."""
        return self.padded_vocab_size if self.head == "vocab" else 1

    def unpadded(self, shape: Sequence[int], axes: Sequence[str | None]) -> tuple[int, ...]:
        """Returns the shape of a parameter with these axis names, without its padding."""
        sizes = {"vocab": self.vocab_size, "queries_per_kv": self.queries_per_kv}
        return tuple(sizes.get(axis or "", size) for size, axis in zip(shape, axes, strict=True))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, at two bytes for each number."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim
