"""A Qwen3 checkpoint's log-probabilities in NumPy and float64, written from its equations.

Shares no line with the project. One example at a time: what packing has to leave apart is apart here.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Tensors = Mapping[str, np.ndarray]  # by the names of the checkpoint, float64


class Shape(NamedTuple):
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float


def logprobs(tensors: Tensors, shape: Shape, tokens: Sequence[int]) -> np.ndarray:
    """log π(tokens[t + 1] | tokens[: t + 1]) in nats, float64[len(tokens) - 1]."""
    embedding = tensors["model.embed_tokens.weight"]
    x = embedding[np.asarray(tokens)]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        weights = {
            name.removeprefix(prefix).removesuffix(".weight"): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        x = x + _attention(weights, shape, _norm(x, weights["input_layernorm"], shape))
        x = x + _mlp(weights, _norm(x, weights["post_attention_layernorm"], shape))
    x = _norm(x, tensors["model.norm.weight"], shape)
    logits = x @ tensors.get("lm_head.weight", embedding).T
    logits -= logits.max(axis=-1, keepdims=True)
    all_logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return all_logprobs[np.arange(len(tokens) - 1), np.asarray(tokens)[1:]]


def _norm(x: np.ndarray, scale: np.ndarray, shape: Shape) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + shape.norm_eps) * scale


def _mlp(weights: Tensors, x: np.ndarray) -> np.ndarray:
    gate = x @ weights["mlp.gate_proj"].T
    return (gate / (1 + np.exp(-gate)) * (x @ weights["mlp.up_proj"].T)) @ weights[
        "mlp.down_proj"
    ].T


def _attention(weights: Tensors, shape: Shape, x: np.ndarray) -> np.ndarray:
    length, mixed = len(x), []
    is_later = np.triu(np.ones((length, length), bool), 1)
    queries, keys, values = (
        (x @ weights[f"self_attn.{name}_proj"].T).reshape(length, -1, shape.head_dim)
        for name in "qkv"
    )
    queries = _rotate(_norm(queries, weights["self_attn.q_norm"], shape), shape)
    keys = _rotate(_norm(keys, weights["self_attn.k_norm"], shape), shape)
    for head in range(shape.num_heads):
        shared = head * shape.num_kv_heads // shape.num_heads
        scores = queries[:, head] @ keys[:, shared].T / np.sqrt(shape.head_dim)
        scores[is_later] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed.append(scores / scores.sum(axis=-1, keepdims=True) @ values[:, shared])
    return np.concatenate(mixed, axis=-1) @ weights["self_attn.o_proj"].T


def _rotate(x: np.ndarray, shape: Shape) -> np.ndarray:
    """Pairs (i, i + half) as complex numbers, turned by the position."""
    half = shape.head_dim // 2
    angles = np.arange(len(x))[:, None] * shape.rope_theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)
